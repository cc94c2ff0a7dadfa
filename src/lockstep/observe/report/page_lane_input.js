// Pointer and keyboard in the lanes do the same things.

function listenToLanes(node) {
  let drag = null;
  const at = (event) => {
    const box = node.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top, box.width];
  };
  node.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, view: page.view || [0, laneNow.length], moved: false };
    node.setPointerCapture(event.pointerId);
  });
  node.addEventListener("pointermove", (event) => {
    const [x, y, width] = at(event);
    if (drag && (drag.moved || Math.abs(event.clientX - drag.x) > 3)) {
      drag.moved = true;
      const by = (drag.x - event.clientX) / laneGeometry(laneNow, width).scale;
      hideTip();
      setView([drag.view[0] + by, drag.view[1] + by]);
      return;
    }
    const found = lanesAt(laneNow, width, x, y);
    if (found?.operation)
      showTip(event.clientX, event.clientY, operationLines(found.operation, laneNow.joins.get(found.operation.key)));
    else if (found?.span) showTip(event.clientX, event.clientY, spanLines(found.rank, found.span));
    else hideTip();
  });
  node.addEventListener("pointerup", (event) => {
    const [x, y, width] = at(event);
    if (drag && !drag.moved) {
      const found = lanesAt(laneNow, width, x, y);
      if (found) page.rank = found.rank.rank;
      chooseOperation(found?.operation || null);
    }
    drag = null;
  });
  node.addEventListener("pointercancel", () => {
    drag = null;
  });
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener(
    "wheel",
    (event) => {
      const [x, , width] = at(event);
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) panLanes(event.deltaX / width);
      else if (event.ctrlKey || event.metaKey || document.activeElement === node)
        zoomLanes(2 ** (event.deltaY / 300), laneGeometry(laneNow, width).us(x));
      else return;
      event.preventDefault();
    },
    { passive: false },
  );
  node.addEventListener("keydown", (event) => {
    const run = event.ctrlKey || event.metaKey || event.altKey ? null : LANE_KEYS[event.key];
    if (run) {
      event.preventDefault();
      run();
    }
  });
}

const LANE_KEYS = {
  ArrowLeft: () => panLanes(-0.1),
  ArrowRight: () => panLanes(0.1),
  ArrowUp: () => moveRank(-1),
  ArrowDown: () => moveRank(1),
  "+": () => zoomLanes(1 / 1.6),
  "=": () => zoomLanes(1 / 1.6),
  "-": () => zoomLanes(1.6),
  0: () => setView(null),
  n: () => moveStep(1),
  p: () => moveStep(-1),
  ".": () => moveOperation(1),
  ",": () => moveOperation(-1),
  Home: () => moveOperation(-1e9),
  End: () => moveOperation(1e9),
  Escape: () => chooseOperation(null),
  Enter: () => {
    const each = chosenOperation();
    if (each) setView([each.entered - (each.to - each.entered) * 0.5, each.to + (each.to - each.entered) * 0.5]);
  },
};
