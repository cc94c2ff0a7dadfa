// Canvases: sharp on every screen, in the colours of the style sheet, painted anew when the width or the theme changes.

const painters = new Map(); // id of a canvas -> function that paints it
let colours = new Map();

// The colour that the style sheet calls --name, as it is in the present theme: it says light-dark(#..., #...).
function colour(name) {
  if (!colours.has(name)) {
    const both = getComputedStyle(document.documentElement)
      .getPropertyValue(`--${name}`)
      .match(/#\w{6}/g);
    colours.set(name, both[isDark() ? 1 : 0]);
  }
  return colours.get(name);
}

function forgetColours() {
  colours = new Map();
}

// Colours from low to high, between the five of the style sheet.
function ramp() {
  if (!colours.has("ramp")) {
    const stops = [0, 1, 2, 3, 4].map((at) =>
      colour(`heat-${at}`)
        .match(/\w\w/g)
        .map((part) => parseInt(part, 16)),
    );
    const steps = Array.from({ length: 64 }, (_, n) => {
      const at = (n / 63) * 4;
      const [low, high, part] = [stops[Math.floor(at)], stops[Math.ceil(at)], at % 1];
      return `rgb(${low.map((value, k) => Math.round(value + (high[k] - value) * part)).join(",")})`;
    });
    colours.set("ramp", steps);
  }
  return colours.get("ramp");
}

// A canvas that fills the width it is given. paint(context, width, height) with units of CSS pixels.
function canvas(id, height, label, paint) {
  const node = element("canvas", {
    id,
    tabindex: "0",
    role: "application",
    "aria-roledescription": "chart",
    "aria-label": label,
    style: { height: `${height}px` },
  });
  painters.set(id, () => {
    const width = Math.floor(node.parentElement?.clientWidth || 0);
    if (!node.isConnected || !width) return;
    const ratio = Math.min(3, devicePixelRatio || 1);
    if (node.width !== Math.round(width * ratio) || node.height !== Math.round(height * ratio)) {
      node.width = Math.round(width * ratio);
      node.height = Math.round(height * ratio);
    }
    const context = node.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    paint(context, width, height);
  });
  return node;
}

function paintCanvas(id) {
  painters.get(id)?.();
}

function repaint() {
  for (const [id, paint] of painters) {
    if (document.getElementById(id)) paint();
    else painters.delete(id);
  }
}

// Round values from low to high, about as many as asked for.
function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step || 0);
  return found;
}

// Diagonal strokes inside a box: told from a plain one without colour.
function hatch(context, x, y, width, height, gap = 5) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.beginPath();
  for (let at = x - height - ((x - height) % gap); at < x + width; at += gap) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.lineWidth = 1;
  context.stroke();
  context.restore();
}

// As much of its beginning, or of its end, as has room.
const trimmed = (context, text, width) => cut(context, text, width, (length) => `${text.slice(0, length)}\u2026`);
const ending = (context, text, width) =>
  cut(context, text, width, (length) => `\u2026${text.slice(text.length - length)}`);

function cut(context, text, width, part) {
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(part(middle)).width <= width) low = middle;
    else high = middle - 1;
  }
  return low > 0 ? part(low) : "";
}
