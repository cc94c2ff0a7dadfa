// Every rank in every step, in colour.

const CHOOSE = "Choose a cell to see its step.";
const HEAT_NAMES = { work: "own work", wall: "whole step", ...PHASE_NAMES };

section("heat", "Every rank, every step", ["heat"], (document) => {
  const heat = document.heat;
  if (!heat?.first?.length)
    return missing(
      "heat",
      "No step has ended yet. Steps are told by ",
      code("lockstep train"),
      ", or in a script of your own by its optimizer's ",
      code("step()"),
      ".",
    );
  const rows = heatRows(heat, page.phase) || heatRows(heat, (page.phase = "wall"));
  const [low, high] = heatBounds(rows);
  const what = HEAT_NAMES[page.phase] || page.phase;
  const name = (bin) =>
    heat.first[bin] === heat.last[bin]
      ? `step ${count(heat.first[bin])}`
      : `steps ${count(heat.first[bin])}\u2013${count(heat.last[bin])}`;
  const picture = matrix({
    id: "heat-canvas",
    label: `Time of ${what} of each rank over the run.`,
    rows: heat.ranks.map((rank) => `rank ${rank}`),
    columns: heat.first.length,
    rowHeight: heat.ranks.length <= 8 ? 22 : heat.ranks.length <= 16 ? 16 : heat.ranks.length <= 32 ? 10 : 4,
    gutter: 62,
    axis: heatAxis(heat),
    cell: (context, x, y, width, height, row, bin) =>
      paintHeatCell(context, x, y, width, height, rows[row][bin], low, high),
    tell: (row, bin) =>
      rows[row][bin] === null || rows[row][bin] === undefined
        ? null
        : heatLines(heat, row, bin, name(bin), what, rows[row][bin]),
    pick: (row, bin) => jump(Math.round((heat.first[bin] + heat.last[bin]) / 2), heat.ranks[row]),
    hover: (at) => setCursor(at ? (heat.first[at[1]] + heat.last[at[1]]) / 2 : null),
  });
  return [
    element("p", { class: "lead" }, heatLead(heat)),
    countedSteps(heat),
    element("div", { class: "tools" }, heatChoice(heat), element("span", { class: "gap" }), heatScale(low, high)),
    element("div", { class: "picture" }, picture),
    asTable("heat", [["steps", "n"], ...heat.ranks.map((rank) => [`rank ${rank}`, "n"])], () =>
      heat.first.map((_, bin) => [name(bin), ...rows.map((row) => time(row[bin]))]),
    ),
  ];
});

// What ranks do themselves tells more than whole steps, which they end together.
function heatRows(heat, phase) {
  if (phase === "wall") return heat.wall_us;
  const rows = heat.phases_us?.[phase === "work" ? "exposed" : phase];
  if (!rows || phase !== "work") return rows || null;
  return heat.wall_us.map((row, rank) => row.map((us, bin) => (us === null ? null : us - (rows[rank][bin] || 0))));
}

// The highest percent shares a colour, so that one slow step does not make all others look alike.
function heatBounds(rows) {
  const all = rows
    .flat()
    .filter((each) => each !== null && each !== undefined)
    .sort((a, b) => a - b);
  if (!all.length) return [0, 1];
  const high = all[Math.floor(0.99 * (all.length - 1))];
  const low = all[Math.floor(0.01 * (all.length - 1))];
  return [Math.min(low, high * 0.8), Math.max(high, all[all.length >> 1] * 1.2, low + 1)];
}

function paintHeatCell(context, x, y, width, height, value, low, high) {
  if (value === null || value === undefined) return;
  const steps = ramp();
  const at = Math.round(((value - low) / (high - low)) * (steps.length - 1));
  context.fillStyle = steps[Math.min(steps.length - 1, Math.max(0, at))];
  context.fillRect(x, y, Math.max(1, width), height - (height > 6 ? 1 : 0));
}

function heatLines(heat, row, bin, name, what, value) {
  const parts = heat.phases
    .filter((phase) => heat.phases_us[phase]?.[row]?.[bin] > 0)
    .map((phase) => `${PHASE_NAMES[phase] || phase} ${time(heat.phases_us[phase][row][bin])}`);
  const mean = heat.first[bin] === heat.last[bin] ? "" : ", mean of a step";
  return [`${name}, rank ${heat.ranks[row]}`, `${what}: ${time(value)}${mean}`, ...parts];
}

function heatAxis(heat) {
  const all = ticks(heat.first[0], heat.last.at(-1), 8).filter((each) => Number.isInteger(each));
  return all
    .map((step) => [heat.last.findIndex((last) => last >= step), step])
    .filter(([bin]) => bin >= 0)
    .map(([bin, step]) => [bin, count(step)]);
}

function heatChoice(heat) {
  const names = ["work", "wall", ...heat.phases].filter((name) =>
    (heatRows(heat, name) || []).flat().some((each) => each > 0),
  );
  return element(
    "fieldset",
    { class: "choice" },
    element("legend", null, "Shown:"),
    names.map((name) =>
      element(
        "label",
        null,
        element("input", {
          type: "radio",
          name: "phase",
          id: `phase-${name}`,
          value: name,
          checked: name === page.phase,
          on: {
            change: () => {
              page.phase = name;
              redraw("heat");
            },
          },
        }),
        HEAT_NAMES[name] || name,
      ),
    ),
  );
}

function heatScale(low, high) {
  const swatches = [0, 1, 2, 3, 4].map((at) => element("i", { class: `heat-${at}` }));
  return element(
    "span",
    { class: "scale" },
    time(low),
    element("span", { class: "swatches", "aria-hidden": "true" }, swatches),
    time(high),
  );
}

function heatLead(heat) {
  const rows = heatRows(heat, "work");
  if (!rows) return CHOOSE;
  const own = heat.ranks.map((rank, row) => [rank, meanOf(rows[row], heat)]).filter(([, us]) => us > 0);
  if (!own.length) return CHOOSE;
  const [rank, most] = own.reduce((a, b) => (b[1] > a[1] ? b : a));
  const others = middleOf(own.filter(([each]) => each !== rank).map(([, us]) => us));
  if (others && most > others * 1.08)
    return `Rank ${rank} works ${time(most)} of a step, the others about ${time(others)}. ${CHOOSE}`;
  return `Each rank works about ${time(others ?? most)} of a step. ${CHOOSE}`;
}

// What is known of steps that `pace` has only counted.
function countedSteps({ counted }) {
  if (!counted) return null;
  const text =
    `Of ${plural(counted, "short step")} only their time and their wait for data were taken: the rest of each is ` +
    "shared out as in steps that were timed before. ";
  return element("p", { class: "aside" }, text, code("LOCKSTEP_GUARD=strict"), " times all.");
}

function meanOf(values, heat) {
  let [sum, steps] = [0, 0];
  const all = heat.last.at(-1) - heat.first[0] + 1;
  values.forEach((value, bin) => {
    if (value === null || (heat.last[bin] < heat.first[0] + 2 && all > 4)) return; // first steps allocate
    const n = heat.last[bin] - heat.first[bin] + 1;
    sum += value * n;
    steps += n;
  });
  return steps ? sum / steps : 0;
}
