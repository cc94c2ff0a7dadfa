// Elements are built from text, never from markup: nothing of a record can become an element or a script.

const SVG = "http://www.w3.org/2000/svg";
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

// Text as it is, with the signs that hide or turn others (control, bidirectional, zero width) spelled out.
function shown(text) {
  return String(text).replace(
    INVISIBLE,
    (sign) => `\u27e8U+${sign.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`,
  );
}

function element(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

// Attributes: style and on are objects, what is null or false is left out. Children: elements, text, lists of them.
function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : shown(child));
  }
  return node;
}

function button(text, run, attributes) {
  return element("button", { type: "button", on: { click: run }, ...attributes }, text);
}

// ------------------------------------------------------------------ figures in words

const digits = (value, most) => value.toLocaleString("en-US", { maximumFractionDigits: most });
const count = (value) => digits(value, 0);

// Four digits that count.
function number(value, least = Math.abs(value)) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (least < 1e-3 || size >= 1e7))
    return value
      .toExponential(3)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  return size >= 1000 ? count(value) : value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
}

// As short as it can be told, for axes. least: of their numbers, which are told alike.
const brief = (value, least) =>
  Math.abs(value) >= 1e4
    ? value.toLocaleString("en-US", { notation: "compact", maximumFractionDigits: 3 })
    : number(value, least);

function percent(share) {
  const value = 100 * share;
  return `${value > 0 && value < 0.1 ? "< 0.1" : digits(value, value < 20 ? 1 : 0)} %`;
}

// From microseconds.
function time(us) {
  if (us === null || us === undefined) return "\u2013";
  const size = Math.abs(us);
  if (size < 1000) return `${digits(us, size < 10 && us % 1 ? 1 : 0)} \u00b5s`;
  if (size < 1e6) return `${digits(us / 1e3, size < 1e4 ? 2 : size < 1e5 ? 1 : 0)} ms`;
  return duration(us / 1e6);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "\u2013";
  if (seconds < 60) return `${digits(seconds, seconds < 10 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : `${m} min ${String(s).padStart(2, "0")} s`;
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "\u2013";
  let [value, at] = [bytes, 0];
  while (Math.abs(value) >= 1024 && at < 5) [value, at] = [value / 1024, at + 1];
  const most = at === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${digits(value, most)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][at]}`;
}

const plural = (n, word, words = `${word}s`) => `${count(n)} ${n === 1 ? word : words}`;

// "rank 1"; "ranks 0, 2-5"
function rankNames(ranks) {
  const ordered = [...new Set(ranks)].sort((a, b) => a - b);
  const runs = [];
  for (const rank of ordered) {
    if (runs.length && runs.at(-1)[1] === rank - 1) runs.at(-1)[1] = rank;
    else runs.push([rank, rank]);
  }
  const spans = runs.map(([a, b]) => (a === b ? a : `${a}\u2013${b}`));
  return `${ordered.length === 1 ? "rank" : "ranks"} ${spans.join(", ")}`;
}

// ------------------------------------------------------------------ signs: told apart by shape, then by colour

const ICONS = {
  error: ["M5.2 1.5h5.6l3.7 3.7v5.6l-3.7 3.7H5.2l-3.7-3.7V5.2z", "M5.6 5.6l4.8 4.8M10.4 5.6l-4.8 4.8"],
  warning: ["M8 1.6l6.8 12.2H1.2z", "M8 6v3.8M8 11.4v.7"],
  note: ["M8 1.5a6.5 6.5 0 1 0 0 13a6.5 6.5 0 1 0 0-13z", "M8 7.3v3.9M8 4.7v.7"],
  good: ["M2.6 2.6h10.8v10.8H2.6z", "M5.2 8.2l2 2l3.8-4.2"],
};

function icon(kind) {
  const [outline, mark] = ICONS[kind] || ICONS.note;
  return svg(
    "svg",
    { class: `icon ${kind}`, viewBox: "0 0 16 16", "aria-hidden": "true" },
    svg("path", { class: "outline", d: outline }),
    svg("path", { class: "mark", d: mark }),
  );
}

// ------------------------------------------------------------------ tables

// columns: [title, kind]; kind "n" is a number, "t" text, "m" monospace. rows: lists of text or elements.
function table(columns, rows, attributes) {
  const cell = (each, at) =>
    element(at === 0 ? "th" : "td", { class: columns[at][1] || "t", scope: at === 0 ? "row" : null }, each);
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": attributes?.["aria-label"] || "Table" },
    element(
      "table",
      null,
      element(
        "thead",
        null,
        element(
          "tr",
          null,
          columns.map(([title, kind]) => element("th", { class: kind || "t", scope: "col" }, title)),
        ),
      ),
      element(
        "tbody",
        null,
        rows.map((row) => element("tr", null, row.map(cell))),
      ),
    ),
  );
}

// What a picture shows as a table, for those who read rather than look; built when it is opened.
function asTable(id, columns, rows) {
  const place = element("div", null);
  const fill = () => place.replaceChildren(table(columns, rows(), { "aria-label": "The same as a table" }));
  const details = element(
    "details",
    { class: "table", id: `${id}-table` },
    element("summary", null, "As a table"),
    place,
  );
  details.addEventListener("toggle", () => {
    page.tables[details.open ? "add" : "delete"](details.id);
    if (details.open) fill();
  });
  if (page.tables.has(details.id)) {
    details.open = true;
    fill();
  }
  return details;
}

function missing(section, ...children) {
  const told = page.document.missing?.[section];
  return element("p", { class: "missing" }, told ? told : children);
}

const code = (text) => element("code", null, text);
