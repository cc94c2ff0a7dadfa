// The lanes with their controls, and what in them is seen and chosen.

const WHY = {
  slowest: "the slowest",
  last: "the last",
  typical: "a typical one",
  finding: "of a finding",
  open: "never ended",
  whole: "all of the program, which ended no step",
};
let laneNow = null; // model of the step that is shown

section("lanes", "Every rank on one clock", ["lanes"], (document) => {
  const steps = recordedSteps();
  if (!steps.length) {
    return missing(
      "lanes",
      "No step was recorded in detail. ",
      code("lockstep run script.py"),
      " lists the operations of steps; the first appear after one step.",
    );
  }
  if (!page.isHeld) [page.step, page.operation] = [null, undefined];
  const chosen = steps.find((each) => each.step === page.step);
  const step = chosen || steps.find(isOpen) || steps.find((each) => each.why === "slowest") || steps.at(-1);
  page.step = step.step;
  if (step !== laneNow?.step) laneNow = laneModel(step, document.lanes.words);
  if (page.operation === undefined || (page.operation !== null && !laneNow.joins.has(page.operation)))
    page.operation = mostWaited(laneNow);
  if (!laneNow.ranks.some((each) => each.rank === page.rank)) page.rank = laneNow.ranks[0]?.rank ?? 0;
  const picture = canvas(
    "lanes-canvas",
    lanesHeight(laneNow.ranks.length),
    `Timeline of step ${step.step} on ${plural(laneNow.ranks.length, "rank")}. Arrow keys pan and change the rank, ` +
      "plus and minus zoom, comma and full stop go through the operations, n and p through the steps.",
    (context, width, height) => paintLanes(context, width, height, laneNow),
  );
  listenToLanes(picture);
  return [
    element("p", { class: "lead" }, laneLead(laneNow)),
    isOpen(step) ? whereRanksWere(laneNow) : null,
    laneTools(steps, step),
    laneLegend(step),
    element("div", { class: "picture" }, picture),
    unlisted(step),
    element(
      "p",
      { class: "hint" },
      "Drag pans, ctrl + wheel zooms. Keys: \u2190 \u2192 pan, \u2191 \u2193 rank, + \u2212 0 zoom, n p step, " +
        "comma and full stop operation, Enter zooms to it.",
    ),
    element("p", { id: "lanes-note", class: "aside", role: "status" }),
    element("div", { id: "operation", class: "operation" }, operationPanel()),
    asTable(
      "lanes",
      [
        ["operation", "m"],
        ["site", "m"],
        ["rank", "n"],
        ["started", "n"],
        ["stood", "n"],
        ["of it waiting", "n"],
        ["last to arrive", "n"],
      ],
      () => laneRows(laneNow),
    ),
  ];
});

// A record has a bounded number of operations of a step.
function unlisted(step) {
  const [most, all] = step.ranks.reduce(
    ([a, b], each) => [Math.max(a, each.unlisted || 0), b + (each.unlisted || 0)],
    [0, 0],
  );
  if (!all) return null;
  const text =
    `Not drawn: ${plural(all, "operation")}, of one rank up to ${count(most)}. Of more than 64 collectives some are ` +
    "recorded, of more than 64 messages from one rank to another none.";
  return element("p", { class: "aside", id: "lanes-unlisted" }, text);
}

function mostWaited(model) {
  const joins = [...model.joins.values()].filter((each) => each.waited > 0);
  return joins.length ? joins.reduce((a, b) => (b.waited > a.waited ? b : a)).key : null;
}

const isOpen = (step) => step.why === "open";

// The one that was not ended; two where a rank had come further than another one.
function openSteps({ step, ranks }) {
  const first = Math.min(step, ...ranks.map((each) => each.step));
  return first < step ? `${count(first)}\u2013${count(step)}` : count(step);
}

// Of a step that was not ended: who was in what, the culprit first.
function whereRanksWere({ step, ranks }) {
  const isApart = openSteps(step).includes("\u2013");
  const together = new Map();
  for (const each of [...ranks].sort((a, b) => b.isCulprit - a.isCulprit)) {
    const key = `${each.isCulprit} ${each.step} ${each.says}`;
    together.set(key, [...(together.get(key) || []), each]);
  }
  const line = (group) =>
    element(
      "li",
      { class: group[0].isCulprit ? "culprit" : null },
      group[0].isCulprit ? icon("error") : null,
      element("b", null, rankNames(group.map((each) => each.rank))),
      `${isApart ? `, in step ${count(group[0].step)}` : ""}: ${group[0].says}`,
    );
  return element("ul", { class: "says" }, [...together.values()].map(line));
}

function laneLead({ step, joins }) {
  const stands = page.document.run?.status === "running" ? "stands still" : "was never ended";
  const named = isOpen(step) ? openSteps(step) : "";
  const untimed = " Of it only waits for data and for operations were timed: \u201cother\u201d is all else.";
  if (isOpen(step))
    return `Step ${named} ${stands}. This is how far each rank has come.${step.counted ? untimed : ""}`;
  const totals = new Map();
  for (const { last, waited } of joins.values()) if (last !== null) totals.set(last, (totals.get(last) || 0) + waited);
  const all = [...totals.values()].reduce((a, b) => a + b, 0);
  const [rank, most] = [...totals].reduce((a, b) => (b[1] > a[1] ? b : a), [null, 0]);
  const took = step.ended_us - step.began_us;
  const what = step.why === "whole" ? "From its first recorded operation on, the program" : `Step ${count(step.step)}`;
  const length = `${what} took ${time(took)}`;
  const rest = step.estimated ? " Its phases changed too often to be kept: they are drawn as sums, without times." : "";
  if (step.ranks.length < 2 || ![...joins.values()].some(({ last }) => last !== null)) return `${length}.${rest}`;
  if (all < took * 0.02 || most < all * 0.4)
    return `${length}. Arrows run from the rank that came last to those that waited for it.${rest}`;
  const share = percent(most / all);
  return `${length}. Of ${time(all)} that ranks waited for each other, ${share} was for rank ${rank}.${rest}`;
}

function laneTools(steps, step) {
  const at = steps.indexOf(step);
  const option = (each) =>
    element(
      "option",
      { value: each.step, selected: each === step },
      `step ${isOpen(each) ? openSteps(each) : count(each.step)} \u00b7 ${WHY[each.why] || each.why}`,
    );
  const chooser = element(
    "select",
    {
      id: "lanes-step",
      "aria-label": "Recorded step",
      on: { change: (event) => chooseStep(Number(event.target.value)) },
    },
    steps.map(option),
  );
  return element(
    "div",
    { class: "tools" },
    button("\u2039", () => moveStep(-1), {
      id: "lanes-previous",
      "aria-label": "Previous recorded step",
      disabled: at === 0,
    }),
    chooser,
    button("\u203a", () => moveStep(1), {
      id: "lanes-next",
      "aria-label": "Next recorded step",
      disabled: at === steps.length - 1,
    }),
    element("span", { class: "gap" }),
    button("\u2212", () => zoomLanes(1.6), { id: "lanes-out", "aria-label": "Zoom out" }),
    button("+", () => zoomLanes(1 / 1.6), { id: "lanes-in", "aria-label": "Zoom in" }),
    button("whole step", () => setView(null), { id: "lanes-fit" }),
    element("output", { id: "lanes-view", class: "aside" }, viewText()),
  );
}

function laneLegend(step) {
  const isThere = (name) => step.ranks.some((rank) => rank.spans.some(([phase]) => phase === name));
  const names = isOpen(step) ? [...PHASES, "open"].filter(isThere) : PHASES;
  const phases = names.map((name) =>
    element("li", null, element("i", { class: `swatch phase-${name}` }), PHASE_NAMES[name]),
  );
  return element(
    "ul",
    { class: "legend", "aria-label": "Legend" },
    phases,
    element("li", null, element("i", { class: "swatch under-way" }), "operation under way"),
    element("li", null, element("i", { class: "swatch waiting" }), "waits for the last to arrive"),
  );
}

function laneRows(model) {
  return [...model.joins.values()].flatMap((join) =>
    join.members.map((each) => [
      each.about.text,
      each.about.site,
      `${each.rank}`,
      time(each.entered),
      time(each.waited),
      time(each.waiting),
      join.last ?? "\u2013",
    ]),
  );
}

// ------------------------------------------------------------------ what is seen

function chooseStep(step) {
  [page.step, page.view, page.operation, page.isHeld] = [step, null, undefined, true];
  redraw("lanes");
  say(`Step ${count(step)}`);
}

function moveStep(by) {
  const steps = recordedSteps();
  const next = steps[steps.findIndex((each) => each.step === page.step) + by];
  if (next) chooseStep(next.step);
}

function viewText() {
  return page.view
    ? `${time(page.view[0])} to ${time(page.view[1])} of ${time(laneNow.length)}`
    : `all ${time(laneNow.length)}`;
}

function setView(view) {
  page.isHeld = true;
  if (view) {
    const span = Math.min(laneNow.length, Math.max(laneNow.length / 1e4, view[1] - view[0]));
    const from = Math.min(laneNow.length - span, Math.max(0, view[0]));
    page.view = span >= laneNow.length ? null : [from, from + span];
  } else page.view = null;
  document.getElementById("lanes-view").textContent = viewText();
  paintCanvas("lanes-canvas");
}

// factor: of the time that is seen; around: stays where it is.
function zoomLanes(factor, around) {
  const [from, to] = page.view || [0, laneNow.length];
  const chosen = chosenOperation();
  const middle =
    around ?? (chosen && chosen.entered >= from && chosen.entered <= to ? chosen.entered : (from + to) / 2);
  setView([middle - (middle - from) * factor, middle + (to - middle) * factor]);
}

function panLanes(part) {
  const [from, to] = page.view || [0, laneNow.length];
  setView([from + part * (to - from), to + part * (to - from)]);
}

// ------------------------------------------------------------------ what is chosen

const chosenOperation = () => laneNow?.joins.get(page.operation)?.members.find((each) => each.rank === page.rank);

function chooseOperation(each) {
  page.isHeld = true;
  page.operation = each ? each.key : null;
  if (each) {
    page.rank = each.rank;
    const [from, to] = page.view || [0, laneNow.length];
    if (each.entered < from || each.entered > to)
      setView([each.entered - (to - from) / 2, each.entered + (to - from) / 2]);
    say(operationLines(each, laneNow.joins.get(each.key)).join(". "));
  }
  paintCanvas("lanes-canvas");
  document.getElementById("operation").replaceChildren(...[operationPanel()].flat());
}

// Through the operations of the chosen rank.
function moveOperation(by) {
  const own = laneNow.ranks.find((each) => each.rank === page.rank)?.operations || [];
  const at = own.findIndex((each) => each.key === page.operation);
  const next = at < 0 ? (by > 0 ? 0 : own.length - 1) : Math.min(own.length - 1, Math.max(0, at + by));
  if (own[next]) chooseOperation(own[next]);
}

function moveRank(by) {
  const row = laneNow.ranks.findIndex((each) => each.rank === page.rank) + by;
  const rank = laneNow.ranks[Math.min(laneNow.ranks.length - 1, Math.max(0, row))];
  page.rank = rank.rank;
  const same = rank.operations.find((each) => each.key === page.operation);
  chooseOperation(same || null);
  if (!same) say(`rank ${rank.rank}, ${plural(rank.operations.length, "operation")}`);
}
