// What the run was: enough to do it again.

section("facts", "Facts of the run", ["run"], (document) => {
  const facts = document.run?.facts || [];
  if (!facts.length)
    return missing(
      "facts",
      "Not recorded: the ranks write them when they start under ",
      code("lockstep run"),
      " or ",
      code("lockstep train"),
      ".",
    );
  const groups = new Map();
  for (const [group, ...rest] of facts) groups.set(group, [...(groups.get(group) || []), rest]);
  const value = (text) => (typeof text === "string" ? text : JSON.stringify(text));
  const row = ([name, each, from]) =>
    element(
      "tr",
      null,
      element("th", { scope: "row", class: "m" }, name),
      element("td", { class: "m pre" }, value(each)),
      element("td", null, from || "\u2013"),
    );
  const heads = ["name", "value", "from where"].map((name) => element("th", { scope: "col" }, name));
  return element(
    "div",
    { class: "scroll fact-table", tabindex: "0", role: "region", "aria-label": "Facts of the run" },
    element(
      "table",
      null,
      element("thead", null, element("tr", null, heads)),
      [...groups].map(([group, rows]) =>
        element(
          "tbody",
          null,
          element("tr", { class: "group" }, element("th", { colspan: 3, scope: "rowgroup" }, group)),
          rows.map(row),
        ),
      ),
    ),
  );
});
