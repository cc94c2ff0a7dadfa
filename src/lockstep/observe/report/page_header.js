// The run in one line of figures, its attempts, and what is wrong with it.

const STATUS = {
  finished: ["good", "finished"],
  running: ["note", "running"],
  failed: ["error", "failed"],
  stopped: ["warning", "stopped"],
  unknown: ["note", "state not known"],
};

function topBar() {
  const themes = THEMES.map((name) =>
    element("option", { value: name, selected: name === page.theme }, name === "auto" ? "as the system" : name),
  );
  return element(
    "div",
    { class: "top" },
    element("p", { class: "brand" }, "lockstep"),
    element(
      "label",
      { class: "theme" },
      "Theme ",
      element("select", { id: "theme", on: { change: (event) => setTheme(event.target.value) } }, themes),
    ),
  );
}

function drawHeader(run) {
  const [kind, word] = STATUS[run.status] || STATUS.unknown;
  return [
    element(
      "h1",
      null,
      run.id || "run",
      " ",
      element("span", { class: `status ${kind}`, id: "status" }, icon(kind), word),
    ),
    run.folder ? element("p", { class: "folder mono" }, run.folder) : null,
    element(
      "dl",
      { class: "figures" },
      figures(run).map(([name, value, unit]) =>
        element(
          "div",
          null,
          element("dt", null, name),
          element("dd", null, value, unit ? element("small", null, ` ${unit}`) : null),
        ),
      ),
    ),
    attempts(run),
  ];
}

function figures(run) {
  const found = [
    ["ranks", count(run.world_size ?? 0)],
    ["steps", count(run.steps ?? 0)],
    ["duration", duration(run.wall_s)],
  ];
  const shares = (page.document.overlap?.ranks || []).filter((each) => each.wall_us > 0);
  const sum = (of) => shares.reduce((all, each) => all + of(each), 0);
  const heat = page.document.heat;
  const step = heat && middleOf((heat.wall_us || []).flat().filter((each) => each !== null));
  if (step && run.steps) found.push(["step, median", time(step)]);
  if (shares.length) {
    const overlap = page.document.overlap;
    const wall = sum((each) => each.wall_us);
    if (run.steps) found.push(["step, mean", time(wall / shares.length)]);
    if (overlap.tokens_per_s) found.push(["tokens/s", count(Math.round(overlap.tokens_per_s)), "all ranks"]);
    const counted = shares.length < run.world_size ? `of ${plural(shares.length, "rank")}` : "all ranks";
    if (overlap.samples_per_s) found.push(["samples/s", count(Math.round(overlap.samples_per_s)), counted]);
    if (overlap.flops_per_s) found.push(["arithmetic", digits(overlap.flops_per_s / 1e12, 3), "TFLOP/s per rank"]);
    const exposed = exposedShare(overlap, sum((each) => each.exposed_us) / wall);
    const waits = `, ${percent(sum((each) => Math.min(each.waited_us, each.exposed_us)) / wall)} waiting`;
    const part = isPartial(overlap) ? "" : waits;
    const whole = run.steps ? "of a step" : "of the program";
    found.push(["exposed communication", exposed, exposed === UNKNOWN ? "" : whole + part]);
  }
  const strategy = page.document.owners?.strategy;
  if (strategy) found.push(["strategy", strategy]);
  if (run.began) found.push(["began", shownDate(run.began)]);
  return found;
}

function shownDate(iso) {
  const at = new Date(iso);
  return Number.isNaN(at.getTime()) ? iso : at.toLocaleString("sv-SE").slice(0, 16);
}

function middleOf(values) {
  const ordered = values.sort((a, b) => a - b);
  return ordered.length ? ordered[ordered.length >> 1] : null;
}

// Those that are shown below; and how far it came, where a later start has done steps of it again.
function attemptSteps({ first_step: first, last_step: last, reached }) {
  const isKept = last !== null && last !== undefined;
  const kept = isKept ? [`${count(first)}\u2013${count(last)}`] : [];
  const again = reached > (isKept ? last : 0) ? [`to ${count(reached)}, done again`] : [];
  return [...kept, ...again].join("; ") || "none";
}

// Only where there was more than one start, or one that ended badly.
function attempts(run) {
  const all = run.attempts || [];
  if (all.length < 2 && !all[0]?.causes?.length) return null;
  const row = (each, at) => [
    `${at + 1}`,
    `${each.world_size}`,
    attemptSteps(each),
    each.ended_s === null || each.ended_s === undefined ? "runs" : duration(each.ended_s - each.began_s),
    (each.causes || []).length ? each.causes.map((cause) => element("div", { class: "pre" }, cause)) : "\u2013",
  ];
  return element(
    "div",
    { class: "attempts" },
    table(
      [
        ["start", "n"],
        ["ranks", "n"],
        ["steps", "n"],
        ["lasted", "n"],
        ["ended by", "m"],
      ],
      all.map(row),
      { "aria-label": "Starts of the run" },
    ),
  );
}

// ------------------------------------------------------------------ diagnosis

const SEVERITY = { error: "Error", warning: "Warning", note: "Note", good: "Good" };

section("diagnosis", "Diagnosis", ["cards", "run"], (document) => {
  const cards = document.cards || [];
  if (!cards.length) {
    return missing(
      "cards",
      "Nothing was found and nothing was judged yet: a run needs a few steps. ",
      code("lockstep run script.py"),
      " watches them.",
    );
  }
  const tally = Object.keys(SEVERITY)
    .map((kind) => [kind, cards.filter((card) => card.severity === kind).length])
    .filter(([, n]) => n);
  const names = { error: "error", warning: "warning", note: "note", good: "check" };
  return [
    element(
      "p",
      { class: "lead" },
      tally.map(([kind, n]) => `${plural(n, names[kind])}${kind === "good" ? " passed" : ""}`).join(", "),
    ),
    element("ol", { class: "cards" }, cards.map(card)),
  ];
});

function card(about, at) {
  const kind = SEVERITY[about.severity] ? about.severity : "note";
  const place = [];
  if (about.step !== null && about.step !== undefined) place.push(`step ${count(about.step)}`);
  if (about.ranks?.length) place.push(rankNames(about.ranks));
  const canJump = place.length > 0 && page.document.lanes?.steps?.length > 0;
  const name = place.join(", ");
  return element(
    "li",
    null,
    element(
      "article",
      { class: `card ${kind}`, "aria-labelledby": `card-${at}` },
      element(
        "h3",
        { id: `card-${at}` },
        icon(kind),
        element("span", { class: "word" }, SEVERITY[kind]),
        " ",
        about.title,
        name && !canJump ? element("span", { class: "place" }, name) : null,
        canJump
          ? button(`show ${name}`, () => jump(about.step, about.ranks?.[0]), { class: "place", id: `card-${at}-jump` })
          : null,
      ),
      about.text ? element("pre", null, about.text) : null,
      about.lever ? element("p", { class: "lever" }, element("b", null, "Do: "), unbroken(about.lever)) : null,
    ),
  );
}

// An option is one word, though it has a hyphen.
const unbroken = (text) =>
  text.split(/(?<= )(--[\w-]+)/).map((part, at) => (at % 2 ? element("span", { class: "word" }, part) : part));
