// Draws the page; where a server gave it, asks that server for newer data and draws what has changed in place.

const POLL_MS = 1000;
const drawn = new Map(); // id of a section -> the data it shows, as text

function usedBy(each) {
  return JSON.stringify([...each.uses, "missing"].map((name) => page.document[name] ?? null));
}

// Draws a section anew. What has the keyboard, what is open and how far boxes are scrolled stays.
function redraw(id) {
  fill(SECTIONS.find((each) => each.id === id));
  repaintIn(document.getElementById(id));
}

function fill(each) {
  const place = document.getElementById(each.id);
  drawn.set(each.id, usedBy(each));
  keepingPlace(place, () =>
    place.querySelector(".body").replaceChildren(...[drawnOrTold(each)].flat(Infinity).filter(Boolean)),
  );
}

// A part of the document that is not as it should be does not take the rest of the page with it.
function drawnOrTold(each) {
  try {
    return each.draw(page.document);
  } catch (error) {
    console.error(error);
    return element("p", { class: "missing" }, `This part of the document cannot be drawn: ${error.message}`);
  }
}

function keepingPlace(place, change) {
  const boxes = () => {
    [...place.querySelectorAll(".scroll, summary")].forEach((each, at) => {
      each.id = `${place.id}-part-${at}`;
    });
    return place.querySelectorAll(".tall, .scroll");
  };
  for (const box of boxes()) page.scrolled[box.id] = box.scrollTop;
  const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
  change();
  for (const box of boxes()) box.scrollTop = page.scrolled[box.id] || 0;
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

function repaintIn(place) {
  for (const [id, paint] of painters) if (place.contains(document.getElementById(id))) paint();
}

// Returns whether all of the document is on the page now.
function drawAll() {
  const head = drawnOrTold({ draw: ({ run }) => drawHeader(run || {}) });
  document.getElementById("run").replaceChildren(...[head].flat().filter(Boolean));
  const changed = SECTIONS.filter((each) => drawn.get(each.id) !== usedBy(each));
  const stale = changed.filter((each) => !isBusy(document.getElementById(each.id)));
  stale.forEach(fill); // all before the first is painted: a picture asks for its width, and that lays out the page
  for (const { id } of stale) repaintIn(document.getElementById(id));
  return stale.length === changed.length;
}

// Somebody drags, chooses from a list or marks text there: what is new comes with the next answer.
function isBusy(place) {
  const marked = getSelection();
  return (
    (place.contains(document.activeElement) && document.activeElement.tagName === "SELECT") ||
    (!marked.isCollapsed && place.contains(marked.anchorNode)) ||
    page.pressed
  );
}

function build() {
  document.getElementById("header").replaceChildren(topBar(), element("div", { id: "run" }));
  document.getElementById("sections").replaceChildren(
    element(
      "ul",
      null,
      SECTIONS.map(({ id, title }) => element("li", null, element("a", { href: `#${id}` }, title))),
    ),
  );
  document
    .getElementById("main")
    .replaceChildren(
      ...SECTIONS.map(({ id, title }) =>
        element(
          "section",
          { id, "aria-labelledby": `${id}-title` },
          element("h2", { id: `${id}-title` }, title),
          element("div", { class: "body" }),
        ),
      ),
    );
  document
    .getElementById("footer")
    .replaceChildren(element("p", null, "Made by lockstep. This file holds everything it shows and asks no network."));
}

// Which section is read now.
function watchSections() {
  const links = new Map([...document.querySelectorAll("#sections a")].map((link) => [link.hash.slice(1), link]));
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((each) => each.isIntersecting)) {
        for (const link of links.values()) link.removeAttribute("aria-current");
        links.get(entry.target.id)?.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const id of links.keys()) observer.observe(document.getElementById(id));
}

async function poll() {
  const answer = await fetch("document.json", { cache: "no-store" }).catch(() => null); // it may be gone: said below
  const text = answer?.ok ? await answer.text() : null;
  if (text !== null && text !== page.text) {
    page.text = text;
    page.document = JSON.parse(text);
  }
  const isDrawn = drawAll();
  const isOver = !["running", "unknown"].includes(page.document.run?.status);
  document.getElementById("footer").firstChild.textContent =
    text === null
      ? "The server no longer answers: this is the last that it said. Its report.html stays in the folder of the run."
      : isOver
        ? "The run is over."
        : "Live: asks for newer data every second.";
  if (!isOver || !isDrawn || text === null) setTimeout(poll, text === null ? 5 * POLL_MS : POLL_MS);
}

function start() {
  document.documentElement.dataset.theme = page.theme = storedTheme();
  page.document = JSON.parse(document.getElementById("document").textContent);
  build();
  drawAll();
  watchSections();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) requestAnimationFrame(repaint);
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme(page.theme));
  addEventListener("beforeprint", () => applyTheme("light")); // paper is
  addEventListener("afterprint", () => applyTheme(page.theme));
  for (const kind of ["pointerdown", "pointerup", "pointercancel"])
    addEventListener(
      kind,
      () => {
        page.pressed = kind === "pointerdown";
      },
      { capture: true },
    );
  addEventListener("scroll", hideTip, { passive: true });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
  });
  if (location.protocol.startsWith("http")) setTimeout(poll, POLL_MS);
}

start();
