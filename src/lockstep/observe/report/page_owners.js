// Which rank holds which part of each parameter, and what that takes.

const MEMORY = [
  ["parameters", "phase-backward"],
  ["gradients", "phase-forward"],
  ["optimizer", "phase-optimizer"],
  ["buffers", "phase-other"],
];

section("owners", "Who owns what", ["owners"], (document) => {
  const owners = document.owners;
  if (!owners?.units?.length)
    return missing(
      "owners",
      "What ranks hold was not recorded: it is after the first step of a model in ",
      code("DistributedDataParallel"),
      ", ",
      code("fully_shard"),
      " or one of lockstep's strategies.",
    );
  const ranks = [...new Set(owners.units.flatMap((unit) => Object.keys(unit.ranks).map(Number)))].sort((a, b) => a - b);
  return [
    element("p", { class: "lead" }, ownersLead(owners, ranks)),
    element(
      "div",
      { class: "columns uneven" },
      element(
        "div",
        null,
        element("h3", null, "Which part of each unit a rank holds"),
        element(
          "div",
          { class: "picture tall", tabindex: "0", role: "region", "aria-label": "Units by rank", id: "owners-box" },
          ownersPicture(owners, ranks),
        ),
        asTable(
          "owners",
          [
            ["unit", "m"],
            ["elements", "n"],
            ["type", "m"],
            ["whole", "n"],
            ...ranks.map((rank) => [`rank ${rank}`, "n"]),
          ],
          () =>
            owners.units.map((unit) => [
              unit.name,
              count(unit.numel),
              unit.dtype,
              size(unit.bytes),
              ...ranks.map((rank) => size(unit.ranks[rank] ?? 0)),
            ]),
        ),
      ),
      element("div", null, element("h3", null, "Memory of each rank"), memoryBars(owners.memory || [])),
    ),
  ];
});

function ownersLead(owners, ranks) {
  const whole = owners.units.reduce((sum, unit) => sum + unit.bytes, 0);
  const held = ranks.map((rank) => owners.units.reduce((sum, unit) => sum + (unit.ranks[rank] ?? 0), 0));
  const [least, most] = [Math.min(...held), Math.max(...held)];
  const elements = owners.units.reduce((sum, unit) => sum + unit.numel, 0);
  const each = most - least < 0.01 * Math.max(1, most) ? size(most) : `${size(least)} to ${size(most)}`;
  const all = page.document.run?.world_size ?? ranks.length;
  const some = all > ranks.length ? `${count(ranks.length)} of ` : "";
  const told = `${some}${plural(all, "rank")}${some && " that have told"}`;
  return (
    `${owners.strategy || "The model"} over ${told}: ${scaled(elements)} parameters in ` +
    `${plural(owners.units.length, "unit")}, ${size(whole)} whole; a rank holds ${each} of them, ` +
    `${percent(most / Math.max(1, whole))}.`
  );
}

const scaled = (n) =>
  n >= 1e9
    ? `${digits(n / 1e9, 2)} G`
    : n >= 1e6
      ? `${digits(n / 1e6, 1)} M`
      : n >= 1e4
        ? `${digits(n / 1e3, 0)} k`
        : count(n);

// A cell is as wide as the unit; what is filled is what the rank holds, behind what the ranks before it hold.
function ownersPicture(owners, ranks) {
  const starts = owners.units.map((unit) => {
    let at = 0;
    return ranks.map((rank) => {
      const from = at % 1;
      at += (unit.ranks[rank] ?? 0) / Math.max(1, unit.bytes);
      return from > 0.999 ? 0 : from;
    });
  });
  return matrix({
    id: "owners-canvas",
    label: "Which part of each unit each rank holds.",
    rows: owners.units.map((unit) => unit.name),
    columns: ranks.length,
    rowHeight: 17,
    gutter: 210,
    axis: ranks.map((rank, column) => [column, `${rank}`]),
    cell: (context, x, y, width, height, row, column) => {
      const unit = owners.units[row];
      const part = (unit.ranks[ranks[column]] ?? 0) / Math.max(1, unit.bytes);
      const room = Math.max(2, width - 4);
      context.fillStyle = colour("under-way");
      context.fillRect(x, y + 3, room, height - 6);
      context.fillStyle = colour("phase-backward");
      if (part > 0)
        context.fillRect(
          x + room * Math.min(starts[row][column], 1 - part),
          y + 3,
          Math.max(1, room * Math.min(1, part)),
          height - 6,
        );
    },
    tell: (row, column) => {
      const unit = owners.units[row];
      const here = unit.ranks[ranks[column]] ?? 0;
      const held = here ? `${size(here)}, ${percent(here / Math.max(1, unit.bytes))}` : "nothing of it";
      return [
        unit.name,
        `${count(unit.numel)} elements, ${unit.dtype}, ${size(unit.bytes)} whole`,
        `rank ${ranks[column]} holds ${held}`,
      ];
    },
  });
}

function memoryBars(memory) {
  if (!memory.length) return element("p", { class: "missing" }, "Not recorded.");
  const total = (each) => MEMORY.reduce((sum, [name]) => sum + (each[name] || 0), 0);
  const most = Math.max(1, ...memory.map(total));
  const bar = (each) =>
    element(
      "span",
      { class: "bar", "aria-hidden": "true" },
      MEMORY.map(([name, kind]) =>
        element("i", { class: kind, style: { width: `${(100 * (each[name] || 0)) / most}%` } }),
      ),
    );
  const legend = element(
    "ul",
    { class: "legend" },
    MEMORY.map(([name, kind]) => element("li", null, element("i", { class: `swatch ${kind}` }), name)),
  );
  const [device, rss] = ["device_mib", "rss_mib"].map((name) => memory.some((each) => each[name]));
  const row = (each) => [
    `${each.rank}`,
    bar(each),
    ...MEMORY.map(([name]) => size(each[name] || 0)),
    size(total(each)),
    ...(rss ? [size((each.rss_mib || 0) * 2 ** 20)] : []),
    ...(device ? [size((each.device_mib || 0) * 2 ** 20)] : []),
  ];
  const columns = [
    ["rank", "n"],
    ["", "b"],
    ...MEMORY.map(([name]) => [name, "n"]),
    ["together", "n"],
    ...(rss ? [["process", "n"]] : []),
    ...(device ? [["device, most", "n"]] : []),
  ];
  return [legend, table(columns, memory.map(row), { "aria-label": "Memory of each rank" })];
}
