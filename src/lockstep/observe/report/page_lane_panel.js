// The chosen operation on all ranks, below the lanes.

function operationPanel() {
  const join = laneNow.joins.get(page.operation);
  if (!join)
    return element(
      "p",
      { class: "aside" },
      "Point at anything to see what it is; choose an operation to see it on all ranks.",
    );
  const { about } = join;
  const facts = [
    ["bytes", about.bytes ? size(about.bytes) : "not known"],
    join.isMissed ? null : ["bandwidth", join.bandwidth ? `${size(join.bandwidth)}/s` : "not known"],
    [join.isMissed ? "never came" : "last to arrive", join.last === null ? "not known" : `rank ${join.last}`],
    join.isMissed ? null : ["communication", time(join.real)],
    ["waited, all ranks", time(join.waited)],
    ["group", about.group || "all ranks"],
  ];
  const hidden = about.unseen ? "not known" : "hidden";
  const longest = Math.max(1, ...join.members.map((each) => each.waited));
  const first = Math.min(...join.members.map((each) => arrivedAt(each, join)));
  const row = (each) => {
    const { waiting, moving } = each;
    const bar = element(
      "span",
      { class: "bar", "aria-hidden": "true" },
      element("i", { class: "waiting", style: { width: `${(100 * waiting) / longest}%` } }),
      element("i", { class: "phase-exposed", style: { width: `${(100 * moving) / longest}%` } }),
    );
    return [
      `${each.rank}${each.rank === join.last ? " (last)" : ""}`,
      `+${time(arrivedAt(each, join) - first)}`,
      each.stood ? time(waiting) : hidden,
      each.stood ? time(moving) : hidden,
      bar,
    ];
  };
  return element(
    "div",
    { class: "columns" },
    element(
      "div",
      null,
      element("h3", { class: "mono" }, about.text),
      element(
        "p",
        { class: "site mono" },
        about.site || "call site not known",
        about.label ? ` \u00b7 ${about.label}` : "",
      ),
      element(
        "dl",
        { class: "facts" },
        facts
          .filter(Boolean)
          .map(([name, value]) => element("div", null, element("dt", null, name), element("dd", null, value))),
      ),
    ),
    table(
      [
        ["rank", "n"],
        ["arrived", "n"],
        ["waited", "n"],
        ["communication", "n"],
        ["", "b"],
      ],
      join.members.map(row),
      { "aria-label": "The operation on each rank" },
    ),
  );
}
