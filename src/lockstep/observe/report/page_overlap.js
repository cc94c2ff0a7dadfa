// Communication: what hides behind work and what does not, what would be if, and who waited for whom.

section("overlap", "Communication", ["overlap"], (document) => {
  const overlap = document.overlap;
  if (!overlap?.ranks?.length)
    return missing(
      "overlap",
      "No communication was recorded. ",
      code("lockstep run script.py"),
      " records collectives of a script; a run of one rank has none.",
    );
  return [
    element("p", { class: "lead" }, overlapLead(overlap)),
    element(
      "div",
      { class: "columns" },
      element("div", null, element("h3", null, "Hidden and exposed, of a step"), overlapBars(overlap)),
      element("div", null, element("h3", null, "What if"), whatIfs(overlap.what_if || []), estimated(overlap)),
    ),
    element("h3", null, "Who waited for whom"),
    element(
      "div",
      { class: "columns aside-picture" },
      waitingPicture(overlap.waiting || []),
      waitingTable(overlap.waiting || [], overlap.unseen || isPartial(overlap)),
    ),
  ];
});

function overlapLead(overlap) {
  const sum = (name) => overlap.ranks.reduce((all, each) => all + each[name], 0);
  const [exposed, waited, wall] = [sum("exposed_us"), sum("waited_us"), sum("wall_us")];
  if (!wall) return "No step has ended yet.";
  if (overlap.unseen)
    return (
      `How much of communication hides is not known: of ${overlap.unseen} nobody sees who stands in it. ` +
      "C++ waits for it, a GPU, or a later step; it counts as work."
    );
  const part = overlap.hidden === null ? "For" : `${percent(overlap.hidden)} of moving data hides behind work; for`;
  const still = `${percent(exposed / wall)} of a step ranks stand still in communication`;
  if (isPartial(overlap)) return `For ${still}. How much of that is waiting for a rank without a record is not known.`;
  const only = `${percent(Math.min(waited, exposed) / wall)} of a step only until the last rank comes`;
  const waiting = waited > 0 ? `, ${only}` : "";
  return `${part} ${still}${waiting}.`;
}

// Who waits for a rank without a record cannot be told from who moves data.
const isPartial = ({ ranks }) => ranks.length < page.document.run.world_size;

// A share of exposed communication, where of some of it nobody knows.
const UNKNOWN = "not known";
const exposedShare = (overlap, share) =>
  !overlap.unseen ? percent(share) : share < 0.0005 ? UNKNOWN : `\u2265 ${percent(share)}`;

function overlapBars(overlap) {
  const { ranks, unseen } = overlap;
  const share = (each, name) => Math.max(0, each[name] || 0) / Math.max(1, each.wall_us);
  const most = Math.max(0.01, ...ranks.map((each) => share(each, "hidden_us") + share(each, "exposed_us")));
  const part = (kind, value) => element("i", { class: kind, style: { width: `${(100 * value) / most}%` } });
  const row = (each) => {
    const [under, exposed, waited] = ["hidden_us", "exposed_us", "waited_us"].map((name) => share(each, name));
    const hidden = unseen ? 0 : under;
    const bar = element(
      "span",
      { class: "bar", "aria-hidden": "true" },
      part("under-way", hidden),
      part("waiting", Math.min(waited, exposed)),
      part("phase-exposed", Math.max(0, exposed - waited)),
    );
    const wait = isPartial(overlap) ? UNKNOWN : exposedShare(overlap, Math.min(waited, exposed));
    return [`${each.rank}`, bar, unseen ? UNKNOWN : percent(hidden), exposedShare(overlap, exposed), wait];
  };
  return table(
    [
      ["rank", "n"],
      ["", "b"],
      ["hidden", "n"],
      ["exposed", "n"],
      ["of it waiting", "n"],
    ],
    ranks.map(row),
    { "aria-label": "Communication of each rank" },
  );
}

function whatIfs(all) {
  if (!all.length)
    return element("p", { class: "missing" }, "Too few steps were recorded in detail by all ranks to play them again.");
  const most = Math.max(...all.map((each) => each.step_us));
  const bar = (each) =>
    element(
      "span",
      { class: "bar", "aria-hidden": "true" },
      element("i", { class: "plain", style: { width: `${(100 * each.step_us) / most}%` } }),
    );
  const least = (each) => (each.is_least ? "\u2265 " : "");
  const gain = (each) => {
    if (Math.abs(each.gain - 1) < 0.005) return each.is_least ? UNKNOWN : "\u2013";
    return `${least(each)}${digits(each.gain, 2)}\u00d7`;
  };
  return table(
    [
      ["", "t"],
      ["", "b"],
      ["step", "n"],
      ["faster", "n"],
    ],
    all.map((each) => [each.name, bar(each), time(each.step_us), gain(each)]),
    { "aria-label": "Steps played again with something changed" },
  );
}

function estimated({ what_if: all, unseen }) {
  if (!all?.length) return null;
  const what = unseen ? "What ranks stand in of some communication" : "What DistributedDataParallel has hidden";
  const hidden = `${what} is not known: a faster network gains at least that much.`;
  const text =
    "Estimates: up to 64 recorded steps, played again with that changed. \u201cAs recorded\u201d changes nothing: " +
    "how far it is from the mean step says how good the others are.";
  return element("p", { class: "aside" }, text, all.some((each) => each.is_least) ? ` ${hidden}` : "");
}

// One row for all ranks that waited for the same one at the same place.
function waitingTable(all, unseen) {
  const nobody = unseen ? "Not known, see above." : "Nobody waited, or no step was recorded in detail.";
  if (!all.length) return element("p", { class: "missing" }, nobody);
  const groups = new Map();
  for (const each of all) {
    const key = JSON.stringify([each.site, each.text, each.label, each.last_rank]);
    const group = groups.get(key) || { ...each, ranks: [], waited_us: 0, share: 0 };
    if (each.rank !== null && each.rank !== undefined) group.ranks.push(each.rank);
    groups.set(
      key,
      Object.assign(group, { waited_us: group.waited_us + each.waited_us, share: group.share + each.share }),
    );
  }
  const bar = (each) =>
    element(
      "span",
      { class: "bar", "aria-hidden": "true" },
      element("i", { class: "phase-exposed", style: { width: `${100 * Math.min(1, each.share)}%` } }),
    );
  const row = (each) => [
    each.ranks.length ? rankNames(each.ranks) : "others",
    each.last_rank === null ? "\u2013" : `rank ${each.last_rank}`,
    time(each.waited_us),
    bar(each),
    percent(each.share),
    each.site || "site not known",
    each.text,
  ];
  const columns = [
    ["who waited", "t"],
    ["for whom", "t"],
    ["how long, in all", "n"],
    ["", "b"],
    ["of all waiting", "n"],
    ["where", "m"],
    ["in", "m"],
  ];
  return table(columns, [...groups.values()].sort((a, b) => b.waited_us - a.waited_us).map(row), {
    "aria-label": "Who waited for whom",
  });
}

// Rows wait, columns are waited for.
function waitingPicture(all) {
  const pairs = all.filter((each) => each.rank !== null && each.rank !== undefined && each.last_rank !== null);
  const ranks = [
    ...new Set([
      ...pairs.flatMap((each) => [each.rank, each.last_rank]),
      ...page.document.overlap.ranks.map((each) => each.rank),
    ]),
  ].sort((a, b) => a - b);
  if (!pairs.length || ranks.length < 3) return null;
  const sums = ranks.map(() => ranks.map(() => 0));
  for (const each of pairs) sums[ranks.indexOf(each.rank)][ranks.indexOf(each.last_rank)] += each.waited_us;
  const most = Math.max(...sums.flat());
  return element(
    "div",
    { class: "picture small" },
    matrix({
      id: "waiting-canvas",
      label: "Who waited for whom: rows wait, columns are waited for.",
      rows: ranks.map((rank) => `rank ${rank}`),
      columns: ranks.length,
      rowHeight: ranks.length <= 16 ? 20 : 9,
      gutter: 62,
      axis: ranks.map((rank, column) => [column, `${rank}`]),
      cell: (context, x, y, width, height, row, column) =>
        paintHeatCell(context, x, y, width - 1, height, row === column ? null : sums[row][column], 0, most),
      tell: (row, column) =>
        row === column
          ? null
          : [
              `rank ${ranks[row]} waited for rank ${ranks[column]}`,
              sums[row][column] ? `${time(sums[row][column])} in all` : "never long",
            ],
    }),
  );
}
