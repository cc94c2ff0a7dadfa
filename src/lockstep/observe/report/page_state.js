// What the page shows now, apart from the document: it outlives a redraw with newer data.

const PHASES = ["data", "forward", "backward", "exposed", "optimizer", "other"];
const PHASE_NAMES = {
  data: "data wait",
  forward: "forward",
  backward: "backward",
  exposed: "exposed communication",
  optimizer: "optimizer",
  other: "other",
  open: "in the step that was not ended",
};

const page = {
  document: {},
  text: null, // of the document, as the server gave it last
  theme: "auto",
  step: null, // whose lanes are shown
  isHeld: false, // somebody has chosen something in them
  rank: 0, // row with the keyboard
  operation: undefined, // key of the chosen one; undefined: the one that was waited for most
  view: null, // [from, to] in microseconds of the step; null: all of it
  phase: "work", // of the heat map
  cursor: null, // step under the pointer, in all curves
  logarithmic: new Set(), // names of curves
  tables: new Set(), // ids of open tables
  epoch: null, // of the data coverage
  cells: {}, // of each matrix the one with the keyboard
  pressed: false, // a button of the mouse, or a finger
  scrolled: {}, // of each box that scrolls how far
};

const SECTIONS = []; // {id, title, draw(document) -> elements, uses: names in the document}

function section(id, title, uses, draw) {
  SECTIONS.push({ id, title, uses, draw });
}

// Said by a screen reader.
function say(text) {
  document.getElementById("live").textContent = shown(text);
}

// Newer data may no longer have the step that somebody looks at: it stays.
function recordedSteps() {
  const steps = page.document.lanes?.steps || [];
  const held = page.isHeld ? laneNow?.step : null;
  if (!held || steps.some((each) => each.step === held.step)) return steps;
  return [...steps, held].sort((a, b) => a.step - b.step);
}

// Shows a step, or the nearest one whose operations were recorded, and a rank in it: of the step that it never ended
// how far it came.
function jump(step, rank) {
  const steps = recordedSteps();
  if (!steps.length) return;
  const wanted = step ?? page.step ?? steps[0].step;
  const nearest = steps.reduce((best, each) =>
    Math.abs(each.step - wanted) < Math.abs(best.step - wanted) ? each : best,
  );
  const own = steps.find((each) => isOpen(each) && each.ranks.some((row) => row.rank === rank && row.step === wanted));
  [page.step, page.view, page.operation, page.isHeld] = [(own || nearest).step, null, undefined, true];
  if (rank !== null && rank !== undefined) page.rank = rank;
  redraw("lanes");
  const place = document.getElementById("lanes");
  place.scrollIntoView({
    behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth",
    block: "start",
  });
  document.getElementById("lanes-canvas")?.focus({ preventScroll: true });
  const isThere = nearest.step === wanted;
  const asked = isThere ? "" : `Step ${count(wanted)} is not among those kept in detail: this is the nearest.`;
  say(`Step ${count(nearest.step)}, rank ${page.rank}. ${asked}`.trim());
  const note = document.getElementById("lanes-note");
  if (note) note.textContent = asked;
}

// ------------------------------------------------------------------ the tip at the pointer

// lines: the first is the title. x, y: in the window.
function showTip(x, y, lines) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...lines.map((line, at) => element("div", { class: at ? null : "title" }, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(x + 14, innerWidth - box.width - 8);
  const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
  tip.style.transform = `translate(${Math.max(8, Math.round(left))}px, ${Math.max(8, Math.round(top))}px)`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

// ------------------------------------------------------------------ theme

const THEMES = ["auto", "light", "dark"];

function storedTheme() {
  try {
    return THEMES.includes(localStorage.getItem("lockstep theme")) ? localStorage.getItem("lockstep theme") : "auto";
  } catch {
    return "auto"; // a page from disk may have no storage
  }
}

function isDark() {
  const name = document.documentElement.dataset.theme;
  return name === "dark" || (name !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

function setTheme(name) {
  page.theme = name;
  applyTheme(name);
  try {
    localStorage.setItem("lockstep theme", name);
  } catch {
    // it then holds until the page is closed
  }
}

function applyTheme(name) {
  document.documentElement.dataset.theme = name;
  forgetColours();
  repaint();
}
