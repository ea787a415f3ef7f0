// Sentences and tables from `data` (page.py), and what the other scripts share.
// Times are in microseconds since the first step of all ranks began.
const $ = id => document.getElementById(id);
const PARTS = [["input", "input wait"], ["compute", "compute"], ["exposed", "exposed communication"],
               ["between", "between steps (Keras, callbacks)"]];
const BEGIN = 0, INPUT = 1, END = 2, TOTAL = 3, WAITS = 4;  // of a step
const NAME = 0, BYTES = 1, READY = 2, STARTED = 3, DONE = 4;  // of a collective
const LEFT = 74, AXIS = 22;  // pixels for the names of ranks, and for the ruler
const ranks = data.ranks, count = data.numbers.length;
const few = ranks.length <= 16;
const LANE = few ? 24 : 10, ROWS = few ? 3 : 0, ROW = 7, GAP = few ? 10 : 2;  // of a rank: step bar, rows of collectives
const last = Math.max(...ranks.map(rank => rank.steps[count - 1][BEGIN] + rank.steps[count - 1][TOTAL]));
const view = {from: 0, to: last};

function duration(us) {
  for (const [unit, size] of [["s", 1e6], ["ms", 1e3]])
    if (Math.abs(us) >= size) return (us / size).toFixed(us / size < 9.95 ? 1 : 0) + " " + unit;
  return Math.round(us) + " us";
}
function bytes(n) {
  for (const unit of ["bytes", "kB", "MB"]) { if (n < 1000) return +n.toPrecision(3) + " " + unit; n /= 1000; }
  return +n.toPrecision(3) + " GB";
}
function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}
function row(cells, head) {
  const made = element("tr");
  for (const [text, kind] of cells) made.append(element(head ? "th" : "td", text, kind));
  return made;
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const parts = step => {
  const waits = step[WAITS];
  let exposed = 0, outside = 0;
  for (let i = 0; i < waits.length; i += 2) {
    exposed += waits[i + 1] - waits[i];
    outside += Math.max(0, waits[i + 1] - Math.max(step[END], waits[i]));
  }
  const between = step[TOTAL] - step[END] - outside;
  return [step[INPUT], Math.max(0, step[TOTAL] - step[INPUT] - exposed - between), exposed, between];
};

function fill() {
  document.title = $("title").textContent = "Steps by rank: " + data.title;
  for (const words of data.words) $("words").append(element("li", words));
  for (const [part, words] of PARTS) {
    const key = element("span", words, "key"), mark = element("i");
    mark.style.background = "var(--" + part + ")";
    key.prepend(mark);
    $("legend").append(key);
  }
  if (data.every > 1) $("thinned").textContent = "Collectives are shown of one step in " + data.every + ".";
  const s = 1e6, longest = Math.max(...data.summary.ranks.map(each => each.step));
  $("ranks").append(row([["rank"], ["host", "left"], ["", "left"], ["step"], ["input wait"], ["compute"], ["exposed"],
                         ["late ranks"], ["between"], ["last in"]], true));
  const late = new Set(data.summary.stragglers.map(each => each.rank));
  for (const each of data.summary.ranks) {
    const made = row([[each.rank], [each.host, "left"], ["", "bar-cell"], [duration(each.step * s)],
      [each.input === null ? "-" : duration(each.input * s)], [duration(each.compute * s)],
      [duration(each.exposed * s)], [duration(each.late_ranks * s)], [duration(each.between * s)],
      [Math.round(each.last * 100) + " %"]]);
    if (late.has(each.rank)) made.className = "late";
    const bar = element("div", undefined, "bar");
    for (const [part] of PARTS) {
      const piece = element("i");
      piece.style.width = 100 * (each[part] || 0) / longest + "%";
      piece.style.background = "var(--" + part + ")";
      bar.append(piece);
    }
    made.children[2].append(bar);
    $("ranks").append(made);
  }
  $("buckets").append(row([["name", "left"], ["bytes"], ["time"], ["ranks apart"], ["steps"]], true));
  for (const each of data.summary.buckets.slice(0, 12))
    $("buckets").append(row([[each.name, "name"], [bytes(each.bytes)], [duration(each.seconds * s)],
                             [duration(each.ranks_apart * s)], [each.steps]]));
}
