const lesson = JSON.parse(document.getElementById("document").textContent);
const byId = (id) => document.getElementById(id);
const stage = byId("stage"), scrub = byId("scrub"), tip = byId("tip");
const LEFT = 150, TOP = 34, LANE = 74, SLOT_MIN = 120;
const state = { screen: 0, at: 0, playing: false, real: false };
let items = [];  // one for each row of the screen: its elements, and when it is on the axis; rows of one slot do not wait for each other

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") element.style.cssText = value;  // the policy of the page refuses it as an attribute
    else element.setAttribute(key, value);
  }
  for (const child of children) element.append(child);
  return element;
}
const html = (name, properties, ...children) => {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
};
const colour = (rank) => `var(--rank-${rank % 8})`;
const laneY = (rank) => TOP + LANE * rank + LANE / 2;
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 2)}..` : text);
const rowsNow = () => lesson.screens[state.screen].rows;
const slotsNow = () => lesson.screens[state.screen].slots;

// Where a row begins and ends on the axis: one slot each, or as long as it really took.
function span(row, width) {
  if (!state.real) return [LEFT + row.slot * width, LEFT + (row.slot + 1) * width];
  const whole = lasted(), room = width * slotsNow();
  return [row.began_us, Math.max(row.ended_us, row.began_us)].map((us) => LEFT + (us / whole) * room);
}

const lasted = () => Math.max(1, ...rowsNow().map((row) => row.ended_us));

function drawScreen() {
  const screen = lesson.screens[state.screen], rows = screen.rows;
  byId("heading").textContent = `${state.screen + 1}. ${screen.title}`;
  byId("text").textContent = screen.text;
  for (const [index, button] of [...byId("screens").children].entries()) {
    if (index === state.screen) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  }
  const slot = Math.max(SLOT_MIN, Math.min(240, (stage.clientWidth - LEFT - 20) / Math.max(1, screen.slots)));
  const width = LEFT + slot * Math.max(1, screen.slots) + 20, height = TOP + LANE * lesson.ranks + 12;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": screen.title });
  picture.append(svg("defs", {}, ...Array.from({ length: lesson.ranks }, (_, rank) => svg(
    "marker", { id: `head${rank}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    svg("path", { d: "M0 0 8 4 0 8z", fill: colour(rank) })))));
  for (let rank = 0; rank < lesson.ranks; rank++) {
    picture.append(svg("line", { class: "lane", x1: LEFT, x2: width - 20, y1: laneY(rank), y2: laneY(rank) }));
    picture.append(svg("text", { class: "rank", x: 14, y: laneY(rank) - 4, style: `fill:${colour(rank)}` }, `rank ${rank}`));
    picture.append(svg("text", { class: "holds", id: `holds${rank}`, x: 14, y: laneY(rank) + 14 }));
  }
  items = rows.map((row) => {
    const [from, to] = span(row, slot);
    const group = svg("g", { class: "item", tabindex: 0, role: "listitem", "aria-label": about(row) }, ...drawRow(row, from, to, slot));
    group.addEventListener("pointermove", (event) => showTip(row, event.clientX, event.clientY));
    group.addEventListener("pointerleave", hideTip);
    group.addEventListener("focus", () => { const box = group.getBoundingClientRect(); showTip(row, box.right, box.bottom); });
    group.addEventListener("blur", hideTip);
    group.addEventListener("click", () => moveTo(row.slot + 1));
    picture.append(group);
    return { row, group, from, to };
  });
  picture.append(svg("line", { class: "head", id: "playhead", y1: 8, y2: height - 8 }));
  for (const item of items.filter((each) => each.row.kind === "message")) {
    item.dot = svg("circle", { r: 6, visibility: "hidden", style: `fill:${colour(item.row.from)}` });
    picture.append(item.dot);
  }
  stage.replaceChildren(picture);
  byId("lines").replaceChildren(...rows.map((row) => html("li", {}, row.words.join("; "))));
  scrub.max = screen.slots;
}

function drawRow(row, from, to, slot) {
  const middle = (from + to) / 2, letters = Math.floor(slot / 8);
  if (row.kind === "message") {
    const down = row.to > row.from, y1 = laneY(row.from) + (down ? 8 : -8), y2 = laneY(row.to) + (down ? -8 : 8);
    const x1 = from + 6, x2 = Math.max(to - 6, x1 + 4), part = 18 / Math.abs(y2 - y1);  // where the value stands: by its sender
    return [
      svg("path", { class: "arrow", d: `M${x1} ${y1}L${x2} ${y2}`, stroke: colour(row.from), "marker-end": `url(#head${row.from})` }),
      svg("text", { x: x1 + (x2 - x1) * part + 10, y: y1 + (y2 - y1) * part + (down ? -2 : 10), style: `fill:${colour(row.from)}` }, cut(row.value, letters)),
    ];
  }
  if (row.kind === "collective") {
    const ranks = row.ranks.map((each) => each.rank), top = laneY(Math.min(...ranks)) - 32, end = laneY(Math.max(...ranks)) + 32;
    const parts = [
      svg("rect", { class: "band", x: middle - slot * 0.42, width: slot * 0.84, y: top, height: end - top, rx: 6 }),
      svg("text", { class: "small", x: middle, y: 18, "text-anchor": "middle" }, cut(row.name, letters + 4)),
    ];
    for (const each of row.ranks) {
      parts.push(svg("text", { class: "small", x: middle, y: laneY(each.rank) - 8, "text-anchor": "middle" }, cut(each.before, letters)));
      parts.push(svg("text", { x: middle, y: laneY(each.rank) + 18, "text-anchor": "middle" }, cut(each.after, letters)));
    }
    return parts;
  }
  return row.ranks.flatMap((each) => {
    const words = row.kind === "say" ? each.text : row.kind === "curve" ? each.name : `${each.name} = ${each.after || "none"}`;
    const shown = cut(words, letters), width = Math.min(slot - 8, shown.length * 7.9 + 12);
    const box = svg("rect", { class: "box", x: middle - width / 2, y: laneY(each.rank) - 14, width, height: 28, rx: 4, stroke: colour(each.rank) });
    const label = svg("text", { x: middle, y: laneY(each.rank) + (row.kind === "curve" ? 26 : 5), "text-anchor": "middle", class: row.kind === "curve" ? "small" : "" }, shown);
    if (row.kind !== "curve") return [box, label];
    const low = Math.min(...each.values), high = Math.max(...each.values), room = slot - 16;
    const points = each.values.map((value, at) => `${middle - room / 2 + (room * at) / Math.max(1, each.values.length - 1)},${laneY(each.rank) + 12 - (26 * (value - low)) / (high - low || 1)}`);
    return [svg("polyline", { class: "arrow", points: points.join(" "), stroke: colour(each.rank) }), label];
  });
}

const about = (row) => [...row.words, row.about, `${row.ended_us - row.began_us} us, from ${row.began_us} us`].filter(Boolean).join("\n");

function showTip(row, x, y) {
  tip.textContent = about(row);
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - tip.offsetHeight - 8))}px`;
}
const hideTip = () => { tip.hidden = true; };

// `at` counts slots: 2.5 is in the middle of the third.
function moveTo(at, quiet = false) {
  state.at = Math.max(0, Math.min(at, slotsNow()));
  scrub.value = state.at;
  const done = Math.floor(state.at), part = state.at - done, last = Math.ceil(state.at) - 1;
  const holds = Array.from({ length: lesson.ranks }, () => "");
  for (const [index, item] of items.entries()) {
    const row = item.row;
    for (const element of [item.group, byId("lines").children[index]]) {
      element.classList.toggle("future", row.slot >= state.at);
      element.classList.toggle("now", row.slot === last);
    }
    if (item.dot) {
      item.dot.setAttribute("visibility", part > 0 && row.slot === done ? "visible" : "hidden");
      item.dot.setAttribute("cx", item.from + (item.to - item.from) * part);
      item.dot.setAttribute("cy", laneY(row.from) + (laneY(row.to) - laneY(row.from)) * part);
    }
    if (row.slot >= done) continue;
    for (const each of row.ranks) {
      if (row.kind === "show") holds[each.rank] = `${each.name} = ${each.after || "none"}`;
      else if (row.kind === "collective" && each.after) holds[each.rank] = each.after;
      else if (row.kind === "message" && each.rank === row.to) holds[each.rank] = row.value;
    }
  }
  for (const [rank, text] of holds.entries()) byId(`holds${rank}`).textContent = cut(text, 17);
  const current = items.filter((item) => item.row.slot === Math.min(done, slotsNow() - 1));
  const from = Math.min(LEFT + 1e9, ...current.map((item) => item.from)), to = Math.max(LEFT, ...current.map((item) => item.to));
  const x = current.length ? (done < slotsNow() ? from + (to - from) * part : to) : LEFT;
  for (const name of ["x1", "x2"]) byId("playhead").setAttribute(name, x);
  if (x < stage.scrollLeft + LEFT || x > stage.scrollLeft + stage.clientWidth - 40) stage.scrollLeft = x - stage.clientWidth / 2;
  if (!quiet && last >= 0) byId("said").textContent = items.filter((item) => item.row.slot === last).flatMap((item) => item.row.words).join("; ");
}

function open(screen) {
  pause();
  state.screen = Math.max(0, Math.min(screen, lesson.screens.length - 1));
  drawScreen();
  moveTo(0);
}
function pause() { state.playing = false; byId("play").textContent = "play"; }
function play() {
  if (state.playing) return pause();
  if (state.at >= slotsNow()) moveTo(0);
  state.playing = true;
  byId("play").textContent = "pause";
  let before = performance.now();
  const turn = (now) => {
    if (!state.playing) return;
    const rows = rowsNow().filter((row) => row.slot === Math.floor(state.at));
    const took = Math.max(0, ...rows.map((row) => row.ended_us - row.began_us));
    const share = state.real ? Math.max(0.02, took / lasted()) * slotsNow() : 1;
    moveTo(state.at + ((now - before) / 1000 / share) * Number(byId("speed").value), true);
    before = now;
    if (state.at >= slotsNow()) pause();
    else requestAnimationFrame(turn);
  };
  requestAnimationFrame(turn);
}

const step = (by) => { pause(); moveTo(by > 0 ? Math.floor(state.at) + 1 : Math.ceil(state.at) - 1); };
const keys = {
  ArrowRight: () => step(1), ArrowLeft: () => step(-1), " ": play, Home: () => moveTo(0), End: () => moveTo(slotsNow()),
  PageDown: () => open(state.screen + 1), PageUp: () => open(state.screen - 1),
  t: () => byId("real").click(),
};
addEventListener("keydown", (event) => {
  const isTheirs = event.target.matches("select") || event.key === " " && event.target.matches("button, input");
  if (event.ctrlKey || event.metaKey || event.altKey || isTheirs) return;
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
byId("first").addEventListener("click", () => { pause(); moveTo(0); });
byId("back").addEventListener("click", () => step(-1));
byId("next").addEventListener("click", () => step(1));
byId("play").addEventListener("click", play);
byId("real").addEventListener("change", (event) => { state.real = event.target.checked; const at = state.at; drawScreen(); moveTo(at); });
scrub.addEventListener("input", () => { pause(); moveTo(Number(scrub.value)); });
byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
addEventListener("resize", () => { const at = state.at; drawScreen(); moveTo(at); });
byId("screens").append(...lesson.screens.map((screen, index) => {
  const button = html("button", { type: "button", title: screen.title }, `${index + 1}`);
  button.addEventListener("click", () => open(index));
  return button;
}));
open(0);
