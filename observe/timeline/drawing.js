// Both canvases: how late each rank was, and the steps with their collectives.
function prepare(id, height) {
  const canvas = $(id), ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.fillStyle = colour("page");
  pen.fillRect(0, 0, width, height);
  return [pen, width];
}
const heat = Math.max(4, Math.min(18, Math.floor(320 / ranks.length)));
function drawLate() {
  const [pen, width] = prepare("late", ranks.length * (heat + 2) + 2);
  const most = Math.max(1, ...data.late.map(each => quantile(each, 0.98)));
  const columns = Math.min(count, Math.floor(width - LEFT)), wide = (width - LEFT) / columns;
  ranks.forEach((rank, r) => {
    const y = 2 + r * (heat + 2);
    if (heat >= 10) { pen.fillStyle = colour("text"); pen.fillText("rank " + rank.rank, 8, y + heat / 2); }
    pen.fillStyle = colour("lane");
    pen.fillRect(LEFT, y, width - LEFT, heat);
    pen.fillStyle = colour("exposed");
    for (let c = 0; c < columns; c++) {
      const first = Math.floor(c * count / columns), end = Math.max(first + 1, Math.floor((c + 1) * count / columns));
      let sum = 0;
      for (let i = first; i < end; i++) sum += data.late[r][i];
      pen.globalAlpha = Math.min(1, sum / (end - first) / most);
      pen.fillRect(LEFT + c * wide, y, Math.max(wide - (wide > 6 ? 1 : 0), 0.7), heat);
    }
    pen.globalAlpha = 1;
  });
  mark(pen, width);
}
function mark(pen, width) {  // the steps that are shown below
  const [first, end] = visible(ranks[0]);
  if (end - first >= count) return;
  const x = LEFT + (width - LEFT) * first / count, wide = Math.max(2, (width - LEFT) * (end - first) / count);
  pen.strokeStyle = colour("text");
  pen.strokeRect(x, 1, wide, ranks.length * (heat + 2));
}
function quantile(values, part) {
  const sorted = values.filter(value => value > 0).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(part * (sorted.length - 1))] : 0;
}
function visible(rank) {  // the first step that ends after view.from, and the first that begins after view.to
  const find = test => { let a = 0, b = count; while (a < b) { const m = (a + b) >> 1; test(m) ? b = m : a = m + 1; } return a; };
  return [find(i => rank.steps[i][BEGIN] + rank.steps[i][TOTAL] > view.from), find(i => rank.steps[i][BEGIN] >= view.to)];
}
let width = 0, boxes = [];  // boxes: the areas with a tooltip
const x = time => LEFT + (time - view.from) * (width - LEFT) / (view.to - view.from);
const top_ = r => AXIS + r * (LANE + ROWS * ROW + GAP);
function drawSteps() {
  let pen;
  [pen, width] = prepare("steps", top_(ranks.length));
  boxes = [];
  ruler(pen);
  const paint = Object.fromEntries([...PARTS.map(([part]) => part), "bucket", "wait"].map(part => [part, colour(part)]));
  ranks.forEach((rank, r) => {
    const y = top_(r), [first, end] = visible(rank);
    pen.save();
    pen.beginPath(); pen.rect(LEFT, y, width - LEFT, LANE + ROWS * ROW + 1); pen.clip();
    const wide = end > first ? (x(rank.steps[end - 1][BEGIN] + rank.steps[end - 1][TOTAL]) - x(rank.steps[first][BEGIN])) / (end - first) : 9;
    if (wide < 4) drawShares(pen, rank, first, end, y, paint);
    else for (let i = first; i < end; i++) drawStep(pen, rank, r, i, y, wide, paint);
    pen.restore();
    pen.fillStyle = colour("text");
    if (few || r % 4 === 0) pen.fillText("rank " + rank.rank, 8, y + LANE / 2);
  });
  const [first, end] = visible(ranks[0]), name = i => data.numbers[Math.min(count - 1, i)] + 1;
  $("range").textContent = end <= first ? "between steps" :
    (end - first === count ? "all " + count + " steps" : end - first === 1 ? "step " + name(first) + " (" + (first + 1) + " of " + count + ")" :
    "steps " + (first + 1) + " to " + end + " of " + count) + ", " + duration(view.to - view.from);
}
function drawShares(pen, rank, first, end, y, paint) {  // too narrow for bars: the parts of each pixel's steps
  const sums = new Map();
  for (let i = first; i < end; i++) {
    const at = Math.floor(x(rank.steps[i][BEGIN])), sum = sums.get(at) || sums.set(at, [0, 0, 0, 0]).get(at);
    parts(rank.steps[i]).forEach((value, p) => { sum[p] += value; });
  }
  const places = [...sums.keys()];
  places.forEach((at, k) => {
    const sum = sums.get(at), all = sum.reduce((a, b) => a + b) || 1, wide = Math.min(4, (places[k + 1] ?? at + 1) - at);
    let from = y + LANE;
    [1, 0, 3, 2].forEach(p => {
      const high = LANE * sum[p] / all;
      pen.fillStyle = paint[PARTS[p][0]];
      pen.fillRect(at, from - high, wide, high);
      from -= high;
    });
  });
}
function drawStep(pen, rank, r, i, y, wide, paint) {
  const step = rank.steps[i], begin = step[BEGIN], box = (from, to, part, top, high, least) => {
    pen.fillStyle = paint[part];
    pen.fillRect(x(begin + from), top, Math.max(least, x(begin + to) - x(begin + from)), high);
  };
  box(0, step[END], "compute", y, LANE, 0);
  box(0, step[INPUT], "input", y, LANE, 0);
  box(step[END], step[TOTAL], "between", y, LANE, 0);
  for (let k = 0; k < step[WAITS].length; k += 2) box(step[WAITS][k], step[WAITS][k + 1], "exposed", y, LANE, 0.5);
  pen.fillStyle = colour("page");
  pen.fillRect(x(begin), y, 1, LANE);
  if (wide > 46 && few) { pen.fillStyle = "#ffffff"; pen.fillText(data.numbers[i] + 1, x(begin) + 4, y + LANE / 2); }
  boxes.push({x: x(begin), to: x(begin + step[TOTAL]), y, end: y + LANE, tell: () => tellStep(rank, r, i)});
  if (!ROWS || wide < 24) return;
  const free = Array(ROWS).fill(-Infinity);
  for (const one of rank.collectives[i]) {
    let line = free.findIndex(until => until <= one[READY]);
    if (line < 0) line = free.indexOf(Math.min(...free));
    free[line] = one[READY] + one[DONE];
    const top = y + LANE + 1 + line * ROW;
    box(one[READY], one[READY] + one[STARTED], "wait", top, ROW - 1, 0.5);
    box(one[READY] + one[STARTED], one[READY] + one[DONE], "bucket", top, ROW - 1, 1);
    const from = x(begin + one[READY]);
    boxes.push({x: from, to: Math.max(from + 2, x(begin + one[READY] + one[DONE])), y: top, end: top + ROW,
                tell: () => tellCollective(rank, i, one)});
  }
}
function ruler(pen) {
  const span = view.to - view.from, about = span / Math.max(2, (width - LEFT) / 110);
  const power = 10 ** Math.floor(Math.log10(about)), tick = power * [1, 2, 5, 10].find(n => n * power >= about);
  pen.fillStyle = colour("soft");
  pen.strokeStyle = colour("line");
  for (let t = Math.ceil(view.from / tick) * tick; t <= view.to; t += tick) {
    pen.fillText(tick >= 1e6 ? +(t / 1e6).toFixed(3) + " s" : tick >= 1e3 ? +(t / 1e3).toFixed(3) + " ms" : Math.round(t) + " us", x(t) + 4, AXIS / 2);
    pen.beginPath(); pen.moveTo(x(t), 0); pen.lineTo(x(t), top_(ranks.length)); pen.stroke();
  }
}
function tellStep(rank, r, i) {
  const values = parts(rank.steps[i]), late = data.late[r][i];
  return "rank " + rank.rank + (rank.host && " on " + rank.host) + ", step " + (data.numbers[i] + 1) + " (" + (i + 1) + " of " + count +
    "): " + duration(rank.steps[i][TOTAL]) + "\n" + PARTS.map(([, words], p) => words + " " + duration(values[p])).join("\n") +
    (late > 0 ? "\nlater than the others by " + duration(late) : "");
}
function tellCollective(rank, i, one) {
  return data.names[one[NAME]] + "\n" + bytes(one[BYTES]) + " on rank " + rank.rank + "\nready after " + duration(one[READY]) +
    " of the step\nwaited " + duration(one[STARTED]) + ", ran " + duration(one[DONE] - one[STARTED]);
}
