// The visible range, and how pointer and keys change it.
let asked = false;
function show(from, to) {
  const span = Math.min(last, Math.max(20, to - from));
  view.from = Math.min(Math.max(0, from), last - span);
  view.to = view.from + span;
  if (asked) return;
  asked = true;
  requestAnimationFrame(draw);
}
function draw() { asked = false; drawSteps(); drawLate(); document.documentElement.dataset.drawn = boxes.length; }
function closer(factor, at = (view.from + view.to) / 2) { show(at - (at - view.from) * factor, at + (view.to - at) * factor); }
function showStep(i) {
  i = Math.max(0, Math.min(count - 1, i));
  const from = Math.min(...ranks.map(rank => rank.steps[i][BEGIN]));
  const to = Math.max(...ranks.map(rank => rank.steps[i][BEGIN] + rank.steps[i][TOTAL]));
  current = i;
  show(from - (to - from) * 0.05, to + (to - from) * 0.05);
}
let current = -1, held = null;
function tip(event, text) {
  $("tip").style.display = text ? "block" : "none";
  if (!text) return;
  $("tip").textContent = text;
  const box = $("tip").getBoundingClientRect();
  $("tip").style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
  $("tip").style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
}
const timeAt = event => view.from + (event.offsetX - LEFT) * (view.to - view.from) / (width - LEFT);
const stepAt = event => Math.floor((event.offsetX - LEFT) * count / ($("late").clientWidth - LEFT));
function listen() {
  const canvas = $("steps");
  canvas.addEventListener("wheel", event => { event.preventDefault(); closer(1.0015 ** event.deltaY, timeAt(event)); }, {passive: false});
  canvas.addEventListener("pointerdown", event => { held = {at: event.offsetX, ...view}; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    if (held) {
      const by = (event.offsetX - held.at) * (held.to - held.from) / (width - LEFT);
      show(held.from - by, held.to - by);
    }
    const found = boxes.findLast(b => event.offsetX >= b.x && event.offsetX < b.to && event.offsetY >= b.y && event.offsetY < b.end);
    tip(event, found && !held ? found.tell() : "");
  });
  for (const each of [canvas, $("late")]) each.addEventListener("pointerleave", () => tip(null, ""));
  canvas.addEventListener("dblclick", event => closer(0.2, timeAt(event)));
  $("late").addEventListener("click", event => { if (stepAt(event) >= 0) showStep(stepAt(event)); });
  $("late").addEventListener("pointermove", event => {
    const i = stepAt(event), r = Math.floor(event.offsetY / (heat + 2));
    tip(event, ranks[r] && i >= 0 && i < count ? tellStep(ranks[r], r, i) : "");
  });
  const by = part => show(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));
  const keys = {"+": () => closer(0.7), "=": () => closer(0.7), "-": () => closer(1.4), "0": () => show(0, last),
                ArrowLeft: () => by(-0.2), ArrowRight: () => by(0.2)};
  document.addEventListener("keydown", event => {
    if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); keys[event.key](); }
  });
  $("all").onclick = () => show(0, last);
  $("in").onclick = () => closer(0.5);
  $("out").onclick = () => closer(2);
  $("back").onclick = () => showStep((current < 0 ? visible(ranks[0])[0] : current) - 1);
  $("on").onclick = () => showStep((current < 0 ? visible(ranks[0])[0] : current) + 1);
  addEventListener("resize", () => show(view.from, view.to));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(view.from, view.to));
  addEventListener("hashchange", fromAddress);
}
function fromAddress() {  // page.html#step=12 shows the 12th step
  const found = /^#step=(\d+)$/.exec(location.hash);
  if (found) showStep(+found[1] - 1);
}
fill();
listen();
draw();
fromAddress();
