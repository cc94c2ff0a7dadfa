// Rows and columns of cells on a canvas, with one cursor for pointer and keyboard.

// about: id, label, rows (names), columns (how many), rowHeight, gutter, axis [[column, text]],
// cell(context, x, y, width, height, row, column), tell(row, column) -> lines or null, pick(row, column) or null
function matrix(about) {
  const { id, rows, columns, rowHeight } = about;
  const foot = about.axis ? 18 : 2;
  const gutter = (width) => Math.min(about.gutter, Math.floor(width * 0.38));
  const left = (width, column) => gutter(width) + Math.round((column * (width - gutter(width))) / columns);
  const node = canvas(
    id,
    rows.length * rowHeight + foot,
    `${about.label} Arrow keys move, Enter chooses.`,
    (context, width) => {
      for (let row = 0; row < rows.length; row += 1) {
        const y = row * rowHeight;
        if (rowHeight >= 9 || row % Math.ceil(10 / rowHeight) === 0) {
          context.fillStyle = colour("soft");
          context.font = rowHeight < 12 ? "9px system-ui, sans-serif" : "11px system-ui, sans-serif";
          context.textAlign = "left";
          context.fillText(ending(context, shown(rows[row]), gutter(width) - 8), 0, y + rowHeight / 2);
        }
        for (let column = 0; column < columns; column += 1) {
          const x = left(width, column);
          about.cell(context, x, y, left(width, column + 1) - x, rowHeight, row, column);
        }
      }
      paintMatrixAxis(context, about, (column) => left(width, column), rows.length * rowHeight, width);
      const at = page.cells[id];
      if (at && document.activeElement === node) {
        context.strokeStyle = colour("text");
        context.lineWidth = 2;
        context.strokeRect(
          left(width, at[1]) - 1,
          at[0] * rowHeight,
          Math.max(3, left(width, at[1] + 1) - left(width, at[1])) + 2,
          rowHeight,
        );
        context.lineWidth = 1;
      }
    },
  );
  listenToMatrix(
    node,
    about,
    (width, x) => Math.floor(((x - gutter(width)) * columns) / (width - gutter(width))),
    left,
  );
  return node;
}

function paintMatrixAxis(context, about, left, y, width) {
  context.fillStyle = colour("soft");
  context.font = "11px system-ui, sans-serif";
  let free = -Infinity;
  for (const [column, text] of about.axis || []) {
    const half = context.measureText(text).width / 2;
    const x = Math.min(width - half, Math.max(half, (left(column) + left(column + 1)) / 2));
    if (x - half < free) continue;
    context.textAlign = "center";
    context.fillText(text, x, y + 10);
    free = x + half + 8;
  }
}

function listenToMatrix(node, about, columnAt, left) {
  const { id, rows, columns, rowHeight } = about;
  const under = (event) => {
    const box = node.getBoundingClientRect();
    const [row, column] = [
      Math.floor((event.clientY - box.top) / rowHeight),
      columnAt(box.width, event.clientX - box.left),
    ];
    return row >= 0 && row < rows.length && column >= 0 && column < columns ? [row, column] : null;
  };
  node.addEventListener("pointermove", (event) => {
    const at = under(event);
    const lines = at && about.tell(...at);
    if (lines) showTip(event.clientX, event.clientY, lines);
    else hideTip();
    about.hover?.(at);
  });
  node.addEventListener("pointerleave", () => {
    hideTip();
    about.hover?.(null);
  });
  node.addEventListener("click", (event) => {
    const at = under(event);
    if (!at) return;
    page.cells[id] = at;
    paintCanvas(id);
    about.pick?.(...at);
  });
  const move = (row, column) => {
    const at = [Math.min(rows.length - 1, Math.max(0, row)), Math.min(columns - 1, Math.max(0, column))];
    page.cells[id] = at;
    paintCanvas(id);
    const lines = about.tell(...at) || ["nothing here"];
    const box = node.getBoundingClientRect();
    showTip(box.left + left(box.width, at[1] + 1), box.top + (at[0] + 0.5) * rowHeight, lines);
    say(lines.join(". "));
  };
  node.addEventListener("keydown", (event) => {
    const [row, column] = page.cells[id] || [0, -1];
    const steps = {
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      Home: [row, 0],
      End: [row, columns - 1],
    };
    if (steps[event.key]) move(...steps[event.key]);
    else if (event.key === "Enter" && column >= 0) {
      hideTip();
      about.pick?.(row, column);
    } else return;
    event.preventDefault();
  });
  node.addEventListener("focus", () => paintCanvas(id));
  node.addEventListener("blur", () => {
    hideTip();
    paintCanvas(id);
  });
}
