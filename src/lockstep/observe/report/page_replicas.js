// When the copies on all ranks were compared, and what was found.

section("replicas", "Replicas", ["replicas"], (document) => {
  const replicas = document.replicas;
  if (!replicas?.checks?.length)
    return missing(
      "replicas",
      "Copies on ranks were not compared. The guard compares them every 100 steps and before checkpoints, unless off (",
      code("LOCKSTEP_GUARD=off"),
      ") or the model is sharded.",
    );
  const broken = replicas.checks.find(([, equal]) => !equal);
  const digest = replicas.digest ? element("span", { class: "mono" }, `digest ${replicas.digest}`) : null;
  const what = replicas.what ? `Compared: ${replicas.what}.` : null;
  return [
    broken
      ? seal(
          "broken",
          `Different at step ${count(broken[0])}`,
          replicas.sealed_until === null
            ? "They were never found equal."
            : `Equal until step ${count(replicas.sealed_until)}.`,
          replicas.differs ? element("span", { class: "pre mono" }, replicas.differs) : null,
          what,
        )
      : seal(
          "whole",
          `Equal on all ranks until step ${count(replicas.sealed_until ?? replicas.checks.at(-1)[0])}`,
          `${plural(replicas.count ?? replicas.checks.length, "comparison")}, none differed.`,
          what,
          digest,
        ),
    matrix({
      id: "replicas-canvas",
      label: "Comparisons of the replicas, by step.",
      rows: ["checks"],
      columns: replicas.checks.length,
      rowHeight: 17,
      gutter: 62,
      axis: ticks(0, replicas.checks.length - 1, 10)
        .filter(Number.isInteger)
        .map((column) => [column, count(replicas.checks[column][0])]),
      cell: (context, x, y, width, height, row, column) =>
        paintState(context, x, y, width, height, replicas.checks[column][1] ? "once" : "twice"),
      tell: (row, column) => [
        `step ${count(replicas.checks[column][0])}`,
        replicas.checks[column][1] ? "equal on all ranks" : "different",
      ],
      pick: (row, column) => jump(replicas.checks[column][0], null),
    }),
    asTable(
      "replicas",
      [
        ["step", "n"],
        ["", "t"],
      ],
      () => replicas.checks.map(([step, equal]) => [count(step), equal ? "equal" : "different"]),
    ),
  ];
});
