// What was proved: a seal, and the state of one part.

const ROSETTE =
  Array.from({ length: 24 }, (_, n) => {
    const [angle, radius] = [(n / 24) * 2 * Math.PI, n % 2 ? 25 : 29];
    const [x, y] = [32 + radius * Math.sin(angle), 32 - radius * Math.cos(angle)];
    return `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  }).join("") + "Z";

// kind: "whole", "broken" or "open"; told apart by their outline and their mark.
function seal(kind, title, ...lines) {
  const marks = { whole: "M21 33l8 8l15 -17", broken: "M23 23l18 18M41 23l-18 18", open: "M32 20v13l8 5" };
  const outline =
    kind === "whole"
      ? svg("path", { class: "outline", d: ROSETTE })
      : svg("circle", { class: "outline", cx: 32, cy: 32, r: 27 });
  return element(
    "div",
    { class: `seal ${kind}` },
    svg(
      "svg",
      { viewBox: "0 0 64 64", "aria-hidden": "true" },
      outline,
      svg("circle", { class: "ring", cx: 32, cy: 32, r: 20 }),
      svg("path", { class: "mark", d: marks[kind] }),
    ),
    element(
      "div",
      null,
      element("h3", null, title),
      lines.filter(Boolean).map((line) => element("p", null, line)),
    ),
  );
}

function paintState(context, x, y, width, height, state) {
  const room = Math.max(1, width - (width > 4 ? 1 : 0));
  context.fillStyle = colour(state === "missing" ? "page" : `seen-${state}`);
  context.fillRect(x, y + 1, room, height - 3);
  context.strokeStyle = colour(state === "missing" ? "seen-missing" : "page");
  if (state === "missing") context.strokeRect(x + 0.5, y + 1.5, Math.max(1, room - 1), height - 4);
  if (state === "twice") hatch(context, x, y + 1, room, height - 3, 4);
}
