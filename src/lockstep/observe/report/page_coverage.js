// Which samples were read, and how often.

section("coverage", "Data, exactly once", ["coverage"], (document) => {
  const epochs = document.coverage?.epochs || [];
  if (!epochs.length)
    return missing(
      "coverage",
      "Which samples were read was not recorded. ",
      code("lockstep train"),
      " and ",
      code("lockstep.data"),
      " samplers record it; so does a ",
      code("DataLoader"),
      " with a ",
      code("DistributedSampler"),
      ", or one of Accelerate, under ",
      code("lockstep run"),
      " once an epoch has ended. Not counted: draws by weight or with replacement, streams, and what Accelerate's ",
      code("dispatch_batches"),
      " hands on.",
    );
  const ended = epochs.findLast((each) => !each.running);
  const chosen = epochs.find((each) => each.epoch === page.epoch) || ended || epochs.at(-1);
  page.epoch = chosen.epoch;
  const choice =
    epochs.length > 1
      ? element(
          "fieldset",
          { class: "choice" },
          element("legend", null, "Epoch:"),
          epochs.map((each) =>
            element(
              "label",
              null,
              element("input", {
                type: "radio",
                name: "epoch",
                id: `epoch-${each.epoch}`,
                value: each.epoch,
                checked: each === chosen,
                on: {
                  change: () => {
                    page.epoch = each.epoch;
                    redraw("coverage");
                  },
                },
              }),
              `${each.epoch}`,
              each.sealed ? "" : isBroken(each) ? " (broken)" : " (open)",
            ),
          ),
        )
      : null;
  return [
    coverageSeal(chosen),
    choice ? element("div", { class: "tools" }, choice) : null,
    chosen.cells?.length ? coveragePicture(chosen) : null,
  ];
});

// What an epoch under way has not read yet may come.
const isBroken = (epoch) => epoch.twice > 0 || (epoch.missing > 0 && !epoch.running);

const COVERED = {
  once: "exactly once",
  twice: "more than once",
  missing: "never",
  open: "not yet",
  meant: "once more, or left out, as the sampler has it",
};

// What a sampler does so that ranks have equally many.
const meant = ({ repeated, dropped }) =>
  (repeated ? `; the sampler hands out ${count(repeated)} of them once more` : "") +
  (dropped ? `; the sampler leaves out ${count(dropped)} more` : "");

function coverageSeal(epoch) {
  const digest = epoch.digest ? element("span", { class: "mono" }, `digest ${epoch.digest}`) : null;
  if (epoch.sealed)
    return seal(
      "whole",
      `Epoch ${epoch.epoch}: exactly once`,
      `Each of ${plural(epoch.samples - (epoch.repeated || 0), "sample")} was read once, by one rank${meant(epoch)}.`,
      digest,
    );
  if (!isBroken(epoch)) {
    const why = epoch.earlier
      ? `it went on from where an earlier start had used ${count(epoch.earlier)}, which is not known to this one.`
      : ["running", "unknown"].includes(page.document.run?.status)
        ? "the seal is set when the epoch has ended."
        : "it did not end, so that there is no seal.";
    return seal(
      "open",
      `Epoch ${epoch.epoch}: so far`,
      `${plural(epoch.samples, "sample")}${epoch.length ? ` of ${count(epoch.length)}` : ""}; ${why}`,
      digest,
    );
  }
  const wrong = [
    epoch.twice ? `${plural(epoch.twice, "sample")} more than once` : "",
    epoch.missing && !epoch.running ? `${plural(epoch.missing, "sample")} never` : "",
  ].filter(Boolean);
  return seal(
    "broken",
    `Epoch ${epoch.epoch}: not exactly once`,
    `Read ${wrong.join(" and ")}, of ${plural(epoch.length ?? epoch.samples, "sample")}.`,
    epoch.examples ? element("span", { class: "pre mono" }, epoch.examples) : null,
    digest,
  );
}

// Columns are ranges of samples; a row per rank, and one for all of them together.
function coveragePicture(epoch) {
  const ranks = [...new Set(epoch.cells.map(([rank]) => rank))].sort((a, b) => a - b);
  const top = Math.max(epoch.length ?? epoch.samples, ...epoch.cells.map(([, , last]) => last + 1));
  const bounds = coverageBounds(epoch.cells, top);
  const columns = bounds.length - 1;
  const seen = ranks.map((rank) =>
    seenIn(
      epoch.cells.filter(([each]) => each === rank),
      bounds,
    ),
  );
  const all = seenIn(epoch.cells, bounds);
  const rows = [...ranks.map((rank) => `rank ${rank}`), "all ranks"];
  const ids = (column) =>
    bounds[column + 1] - bounds[column] === 1
      ? `sample ${count(bounds[column])}`
      : `samples ${count(bounds[column])}\u2013${count(bounds[column + 1] - 1)}`;
  const none = epoch.running || epoch.earlier ? "open" : epoch.sealed ? "meant" : "missing";
  const twice = epoch.sealed ? "meant" : "twice";
  const words = epoch.running || !epoch.earlier ? COVERED : { ...COVERED, open: "not by the starts that are known" };
  const state = ({ mean, least, most }) =>
    most > 1 + 1e-4 || mean > 1 + 1e-4 ? twice : least < 1 - 1e-4 && mean < 1 - 1e-4 ? none : "once";
  const picture = matrix({
    id: "coverage-canvas",
    label: "Which rank read which samples.",
    rows,
    columns,
    rowHeight: ranks.length <= 16 ? 17 : 9,
    gutter: 62,
    axis: ticks(0, top, 8)
      .filter((at) => at < top)
      .map((at) => [bounds.findIndex((bound, n) => bounds[n + 1] > at), count(at)]),
    cell: (context, x, y, width, height, row, column) => {
      const each = row < ranks.length ? seen[row][column] : all[column];
      if (row < ranks.length) paintSeen(context, x, y, width, height, each.mean);
      else paintState(context, x, y, width, height, state(each));
    },
    tell: (row, column) => {
      const each = row < ranks.length ? seen[row][column] : all[column];
      if (row < ranks.length)
        return [
          ids(column),
          `${rows[row]} read ${each.mean ? `${number(each.mean)} of each` : "none of them"}`.replace(
            "1 of each",
            "each once",
          ),
        ];
      return [ids(column), `${state(each) === "once" ? "each" : "some"} ${words[state(each)]}`];
    },
  });
  return [
    element("div", { class: "picture" }, picture),
    element(
      "ul",
      { class: "legend" },
      [...new Set(["once", ...all.map(state)])].map((name) =>
        element("li", null, element("i", { class: `swatch seen-${name}` }), words[name]),
      ),
    ),
    asTable(
      "coverage",
      [
        ["rank", "n"],
        ["first", "n"],
        ["last", "n"],
        ["times", "n"],
      ],
      () => epoch.cells.map(([rank, first, last, times]) => [`${rank}`, count(first), count(last), number(times)]),
    ),
  ];
}

// Of columns: those of the cells where they are bins, else equal parts.
function coverageBounds(cells, top) {
  const cuts = [...new Set([0, top, ...cells.flatMap(([, first, last]) => [first, last + 1])])].sort((a, b) => a - b);
  if (cuts.length > 40 && cuts.length < 400) return cuts;
  const columns = Math.min(160, top);
  return Array.from({ length: columns + 1 }, (_, n) => Math.round((n * top) / columns));
}

// How often the samples of each column were read: on average, and the one read least and most.
function seenIn(cells, bounds) {
  return bounds.slice(0, -1).map((from, n) => {
    const to = Math.max(from + 1, bounds[n + 1]);
    const inside = cells.filter(([, first, last]) => first < to && last >= from);
    const cuts = [
      ...new Set([from, to, ...inside.flatMap(([, first, last]) => [Math.max(from, first), Math.min(to, last + 1)])]),
    ].sort((a, b) => a - b);
    let [sum, least, most] = [0, Infinity, 0];
    for (let at = 0; at + 1 < cuts.length; at += 1) {
      const times = inside
        .filter(([, first, last]) => first <= cuts[at] && last >= cuts[at])
        .reduce((total, cell) => total + cell[3], 0);
      sum += times * (cuts[at + 1] - cuts[at]);
      [least, most] = [Math.min(least, times), Math.max(most, times)];
    }
    return { mean: sum / (to - from), least, most };
  });
}

function paintSeen(context, x, y, width, height, mean) {
  context.fillStyle = colour("under-way");
  context.fillRect(x, y + 1, Math.max(1, width - (width > 4 ? 1 : 0)), height - 3);
  if (!mean) return;
  context.globalAlpha = Math.min(1, 0.25 + 0.75 * mean);
  context.fillStyle = colour(mean > 1 ? "seen-twice" : "phase-backward");
  context.fillRect(x, y + 1, Math.max(1, width - (width > 4 ? 1 : 0)), height - 3);
  context.globalAlpha = 1;
}
