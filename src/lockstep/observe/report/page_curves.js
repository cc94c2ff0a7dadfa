// Values over steps: one small picture each, with one cursor through all of them.

const CURVE = { height: 168, left: 58, right: 10, top: 8, bottom: 20 };
const curvePainters = new Map(); // name -> function that moves its cursor

section("curves", "Curves", ["curves", "run"], (document) => {
  const curves = (document.curves || []).filter((each) => each.steps.length);
  curvePainters.clear();
  if (!curves.length) {
    return missing(
      "curves",
      "No values were logged. ",
      code("lockstep train"),
      " logs loss, learning rate and throughput; from your own script call ",
      code("lockstep.log(step, loss=...)"),
      ".",
    );
  }
  return element(
    "div",
    { class: "curves" },
    curves.map((each, at) => curve(each, at, restarts(document))),
  );
});

// First steps of the starts after the first.
function restarts(document) {
  return (document.run?.attempts || [])
    .slice(1)
    .map((each) => each.first_step)
    .filter((step) => step !== null && step !== undefined);
}

function curve(about, at, starts) {
  const id = `curve-${at}`;
  const finite = about.values.filter((each) => each !== null);
  const canBeLogarithmic = finite.length > 0 && Math.min(...finite) > 0;
  const isLogarithmic = canBeLogarithmic && page.logarithmic.has(about.name);
  const value = element("span", { class: "value" });
  const place = element("div", { class: "plot" });
  const toggle = button(
    "log",
    () => {
      page.logarithmic[isLogarithmic ? "delete" : "add"](about.name);
      redraw("curves");
    },
    {
      id: `${id}-log`,
      class: "small",
      "aria-pressed": String(isLogarithmic),
      "aria-label": `Logarithmic scale for ${about.name}`,
      disabled: !canBeLogarithmic,
    },
  );
  const figure = element(
    "figure",
    { class: "curve" },
    element(
      "figcaption",
      null,
      element("b", null, about.name),
      value,
      toggle,
    ),
    place,
    brokenValues(about),
    asTable(
      id,
      [
        ["step", "n"],
        ["value", "n"],
        ...(about.low
          ? [
              ["low", "n"],
              ["high", "n"],
            ]
          : []),
      ],
      () =>
        about.steps.map((step, n) => [
          count(step),
          number(about.values[n]),
          ...(about.low ? [number(about.low[n]), number(about.high[n])] : []),
        ]),
    ),
  );
  painters.set(id, () => {
    const width = place.clientWidth;
    if (width) place.replaceChildren(plot(id, about, width, isLogarithmic, starts, value));
  });
  figure.id = id;
  return figure;
}

function brokenValues(about) {
  const broken = about.steps.filter((_, n) => about.values[n] === null);
  if (!broken.length) return null;
  return element(
    "p",
    { class: "broken" },
    icon("error"),
    `not finite (NaN or Inf) at ${plural(broken.length, "point")}, first at step ${count(broken[0])}`,
  );
}

// From the first to the last of all curves: they lie below each other, and have one cursor.
function allSteps() {
  const ends = page.document.curves.map((each) => [each.steps[0], each.steps.at(-1)]);
  return [Math.min(...ends.map(([first]) => first)), Math.max(...ends.map(([, last]) => last))];
}

function plot(id, about, width, isLogarithmic, starts, value) {
  const { height, left, right, top, bottom } = CURVE;
  const scale = isLogarithmic ? Math.log10 : (each) => each;
  const bounds = curveBounds(about, isLogarithmic);
  const [first, last] = allSteps();
  const x = (step) => left + ((width - left - right) * (step - first)) / Math.max(1, last - first);
  const y = (each) =>
    top + (height - top - bottom) * (1 - (scale(each) - scale(bounds[0])) / (scale(bounds[1]) - scale(bounds[0])));
  const marks = curveMarks(bounds, isLogarithmic);
  const least = Math.min(...marks.map(Math.abs).filter(Boolean));
  const steps = ticks(first, last, Math.max(2, (width - left) / 90)).filter((each) => Number.isInteger(each));
  const cursor = svg(
    "g",
    { class: "cursor", visibility: "hidden" },
    svg("line", { y1: top, y2: height - bottom }),
    svg("circle", { r: 3 }),
  );
  const node = svg(
    "svg",
    {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      tabindex: "0",
      role: "application",
      "aria-roledescription": "chart",
      id: `${id}-plot`,
      "aria-label":
        `${about.name} over ${plural(about.steps.length, "point")}, steps ${count(about.steps[0])} to ` +
        `${count(about.steps.at(-1))}, last value ${number(about.values.at(-1))}. ` +
        "Left and right arrow keys read values.",
    },
    marks.map((each) => [
      svg("line", { class: "grid", x1: left, x2: width - right, y1: y(each), y2: y(each) }),
      svg("text", { x: left - 6, y: y(each) + 3.5, "text-anchor": "end" }, brief(each, least)),
    ]),
    steps.map((each) => {
      const text = count(each);
      const at = Math.min(width - 3.5 * text.length, Math.max(left + 4, x(each))); // so that the last one is whole
      return svg("text", { x: at, y: height - 5, "text-anchor": "middle" }, text);
    }),
    starts
      .filter((each) => each > first && each <= last)
      .map((each) =>
        svg(
          "line",
          { class: "restart", x1: x(each), x2: x(each), y1: top, y2: height - bottom },
          svg("title", null, `started again at step ${each}`),
        ),
      ),
    about.low ? svg("path", { class: "band", d: bandPath(about, x, y) }) : null,
    svg("path", { class: "line", d: linePath(about, x, y) }),
    lonePoints(about).map((n) => svg("circle", { class: "lone", cx: x(about.steps[n]), cy: y(about.values[n]), r: 2 })),
    about.steps
      .filter((_, n) => about.values[n] === null)
      .map((step) => svg("path", { class: "not-finite", d: `M${x(step) - 3} ${top}l6 6m0 -6l-6 6` })),
    cursor,
  );
  listenToCurve(node, about, (px) => first + ((px - left) / (width - left - right)) * Math.max(1, last - first));
  curvePainters.set(id, () => moveCurveCursor(cursor, about, x, y, value));
  moveCurveCursor(cursor, about, x, y, value);
  return node;
}

// Lowest and highest, a little apart; logarithmic ones are positive.
function curveBounds(about, isLogarithmic) {
  const all = [about.values, about.low || [], about.high || []]
    .flat()
    .filter((each) => each !== null && (!isLogarithmic || each > 0));
  let [low, high] = [Math.min(...all), Math.max(...all)];
  if (!all.length) [low, high] = [0, 1];
  if (isLogarithmic) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low >= 0 && low < (high - low) * 0.6 ? 0 : low - room, high + room];
}

function curveMarks([low, high], isLogarithmic) {
  if (!isLogarithmic) return ticks(low, high, 4);
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const powers = Array.from({ length: to - from + 1 }, (_, n) => from + n);
  const per = to - from > 5 ? [1] : to - from > 1 ? [1, 3] : [1, 2, 3, 5];
  return powers.flatMap((power) => per.map((each) => each * 10 ** power)).filter((each) => each >= low && each <= high);
}

function linePath(about, x, y) {
  let isDown = false;
  return about.steps
    .map((step, n) => {
      if (about.values[n] === null) {
        isDown = false;
        return "";
      }
      const letter = isDown ? "L" : "M";
      isDown = true;
      return `${letter}${x(step).toFixed(1)} ${y(about.values[n]).toFixed(1)}`;
    })
    .join("");
}

// Values without a neighbour, which no line shows.
function lonePoints({ values }) {
  return values
    .map((_, n) => n)
    .filter((n) => values[n] !== null && (values[n - 1] ?? null) === null && (values[n + 1] ?? null) === null);
}

function bandPath(about, x, y) {
  const at = about.steps.map((_, n) => n).filter((n) => about.low[n] !== null && about.high[n] !== null);
  const side = (values, order) =>
    order.map((n) => `${x(about.steps[n]).toFixed(1)} ${y(values[n]).toFixed(1)}`).join("L");
  return at.length ? `M${side(about.high, at)}L${side(about.low, [...at].reverse())}Z` : "";
}

// ------------------------------------------------------------------ cursor

function nearestIndex(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

function moveCurveCursor(cursor, about, x, y, value) {
  const at = page.cursor === null ? about.steps.length - 1 : nearestIndex(about.steps, page.cursor);
  const [step, each] = [about.steps[at], about.values[at]];
  value.replaceChildren(`${number(each)}`, element("small", null, ` step ${count(step)}`));
  cursor.setAttribute("visibility", page.cursor === null ? "hidden" : "visible");
  const [line, dot] = cursor.children;
  for (const name of ["x1", "x2"]) line.setAttribute(name, x(step));
  dot.setAttribute("cx", x(step));
  if (each !== null) dot.setAttribute("cy", y(each));
  dot.setAttribute("visibility", each === null ? "hidden" : "inherit");
}

function setCursor(step) {
  page.cursor = step;
  for (const move of curvePainters.values()) move();
}

function listenToCurve(node, about, stepAt) {
  node.addEventListener("pointermove", (event) => setCursor(stepAt(event.clientX - node.getBoundingClientRect().left)));
  node.addEventListener("pointerleave", () => setCursor(null));
  node.addEventListener("blur", () => setCursor(null));
  node.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    const from = page.cursor === null ? (by < 0 ? about.steps.length : -1) : nearestIndex(about.steps, page.cursor);
    const at = Math.min(about.steps.length - 1, Math.max(0, from + by));
    setCursor(about.steps[at]);
    say(`${about.name} at step ${count(about.steps[at])}: ${number(about.values[at])}`);
  });
}
