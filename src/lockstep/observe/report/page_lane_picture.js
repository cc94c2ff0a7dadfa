// Paints the lanes: a row per rank with its phases, below them its operations, and arrows from who came last.

const LANES_TOP = 24;
const LANES_FOOT = 12;

// [up to how many ranks, height of a lane, of its phases, of a track, tracks]
const LANE_SIZES = [
  [4, 62, 24, 7, 3],
  [8, 52, 18, 6, 3],
  [16, 34, 14, 5, 2],
  [32, 24, 11, 5, 1],
  [Infinity, 16, 8, 3, 1],
];

function laneSizes(ranks) {
  const [, lane, phases, track, tracks] = LANE_SIZES.find(([most]) => ranks <= most);
  return { lane, phases, track, tracks };
}

const lanesHeight = (ranks) => LANES_TOP + ranks * laneSizes(ranks).lane + LANES_FOOT;

// Where things are: x of a time, time of an x, the top of a row.
function laneGeometry(model, width) {
  const sizes = laneSizes(model.ranks.length);
  const gutter = width < 560 ? 30 : 62;
  const [from, to] = page.view || [0, model.length];
  const scale = (width - gutter - 1) / Math.max(1e-6, to - from);
  const top = (row) => LANES_TOP + row * sizes.lane;
  const trackTop = (row, track) =>
    top(row) + 4 + sizes.phases + 3 + Math.min(track, sizes.tracks - 1) * (sizes.track + 2);
  return {
    ...sizes,
    gutter,
    from,
    to,
    scale,
    width,
    x: (us) => gutter + (us - from) * scale,
    us: (x) => from + (x - gutter) / scale,
    top,
    trackTop,
  };
}

function paintLanes(context, width, height, model) {
  const g = laneGeometry(model, width);
  paintLaneAxis(context, g, height, model);
  context.save();
  context.beginPath();
  context.rect(g.gutter, 0, width - g.gutter, height);
  context.clip();
  for (const rank of model.ranks) paintRank(context, g, rank, model);
  for (const join of model.joins.values()) if (join.key !== page.operation) paintJoin(context, g, join, false);
  const chosen = model.joins.get(page.operation);
  if (chosen) paintJoin(context, g, chosen, true);
  context.restore();
  paintOverview(context, g, height, model);
}

function paintLaneAxis(context, g, height, model) {
  const [unit, name] = [
    [1e6, "s"],
    [1e3, "ms"],
    [1, "\u00b5s"],
  ].find(([size]) => g.to - g.from >= size * (size === 1e6 ? 20 : 2) || size === 1);
  context.textAlign = "center";
  for (const at of ticks(g.from / unit, g.to / unit, (g.width - g.gutter) / 90)) {
    const x = Math.round(g.x(at * unit)) + 0.5;
    context.fillStyle = colour("line");
    context.fillRect(x - 0.5, LANES_TOP - 5, 1, height - LANES_TOP - LANES_FOOT + 5);
    const text = digits(at, 3);
    if (x < g.gutter + 12 || x + context.measureText(text).width / 2 > g.width - 24) continue;
    context.fillStyle = colour("soft");
    context.fillText(text, x, 9);
  }
  context.fillStyle = colour("soft");
  context.textAlign = "right";
  context.fillText(name, g.width - 2, 9);
  for (const rank of model.ranks) {
    const y = g.top(rank.row);
    context.fillStyle = colour("line");
    context.fillRect(0, y + g.lane - 1, g.width, 1);
    const isChosen = rank.rank === page.rank;
    context.textAlign = "left";
    context.fillStyle = colour(rank.isCulprit ? "error" : isChosen ? "text" : "soft");
    context.font = `${isChosen || rank.isCulprit ? "600 " : ""}${g.lane < 20 ? 10 : 11}px system-ui, sans-serif`;
    context.fillText(g.gutter < 40 ? `${rank.rank}` : `rank ${rank.rank}`, 8, y + 4 + g.phases / 2);
    if (isChosen) {
      context.fillStyle = colour("accent");
      context.fillRect(0, y + 4, 3, g.lane - 9);
    }
  }
  context.font = "11px system-ui, sans-serif";
}

const known = (phase) => (phase === "open" || PHASES.includes(phase) ? phase : "other");

function paintRank(context, g, rank, model) {
  const y = g.top(rank.row) + 4;
  for (const span of rank.spans) {
    const [x, w] = [g.x(span.from), (span.to - span.from) * g.scale];
    if (x > g.width || x + w < g.gutter) continue;
    context.fillStyle = colour(`phase-${known(span.phase)}`);
    context.fillRect(x, y, Math.max(0.75, w - (w > 3 ? 1 : 0)), g.phases);
  }
  const last = rank.spans.at(-1); // of a step that was not ended: what the rank says is said of it
  const late = rank.operations.filter((each) => each.waiting > 0);
  const waits = late.map((each) => paintWaiting(context, g, each, model.joins.get(each.key), y));
  const begins = rank.operations.filter((each) => each.stood).map((each) => g.x(each.waitFrom));
  for (const span of g.phases >= 11 ? rank.spans : []) {
    const says = span === last && rank.says;
    const isWait = says || (rank.says && span.phase === "exposed");
    if (isWait && rank.operations.some((each) => each.stood)) continue; // it has a name below
    const laid = begins.filter((x) => span.phase !== "exposed" && x > g.x(span.from)); // a wait over the end of it
    const to = Math.min(g.x(span.to), g.width, ...laid);
    const covered = waits.filter((end) => end > g.x(span.from) && end <= g.x(span.to) + 1);
    const from = Math.max(g.x(span.from), g.gutter, ...(span.phase === "exposed" ? covered : []));
    if (to - from < (says ? 90 : 34)) continue;
    context.fillStyle = colour(`on-${known(span.phase)}`);
    context.textAlign = "left";
    const text = says ? trimmed(context, shown(says), to - from - 10) : shown(span.phase);
    if (context.measureText(text).width <= to - from - 8) context.fillText(text, from + 5, y + g.phases / 2 + 0.5);
  }
  const seen = rank.operations.filter((each) => g.x(each.entered) <= g.width && g.x(each.to) >= g.gutter);
  for (const each of seen) paintUnderWay(context, g, each);
  for (const each of seen) if (each.stood) paintStood(context, g, each); // above the others
  if (rank.isCulprit) paintCulprit(context, g, rank, y);
}

// A frame around what it did, and a cross where it ended.
function paintCulprit(context, g, rank, y) {
  const [from, to] = [g.x(rank.began), g.x(rank.ended)];
  const [middle, arm] = [y + g.phases / 2, Math.min(5, g.phases / 3)];
  const cross = Math.max(to - 10, Math.min(to, g.gutter) + arm + 2);
  context.strokeStyle = colour("error");
  context.lineWidth = 2;
  context.strokeRect(from + 1, y, Math.max(1, to - from - 2), g.phases);
  context.beginPath();
  for (const side of [-arm, arm]) {
    context.moveTo(cross - arm, middle - side);
    context.lineTo(cross + arm, middle + side);
  }
  context.stroke();
  context.lineWidth = 1;
}

// Of what a rank stood in communication, the part that it waited for the last to arrive, with its name. Returns where
// that ends.
function paintWaiting(context, g, each, join, y) {
  const [x, w] = [g.x(each.waitFrom), each.waiting * g.scale];
  if (w < 3 || x > g.width || x + w < g.gutter) return x + w;
  context.fillStyle = colour("waiting");
  context.fillRect(x, y, w - 1, g.phases);
  context.strokeStyle = colour("hatch");
  hatch(context, x, y, w - 1, g.phases, 6);
  const from = Math.max(x, g.gutter);
  const seen = Math.min(x + w, g.width) - from - 6;
  const texts =
    join.last === null ? ["waits"] : [`waits for rank ${join.last}`, `for rank ${join.last}`, `for ${join.last}`];
  const text = texts.find((each) => context.measureText(each).width + 8 <= seen);
  if (!text || g.phases < 11) return x + w;
  const room = context.measureText(text).width + 8;
  context.fillStyle = colour("waiting");
  context.fillRect(from + 2, y, room, g.phases);
  context.fillStyle = colour("on-waiting");
  context.textAlign = "left";
  context.fillText(text, from + 6, y + g.phases / 2 + 0.5);
  return x + w;
}

function paintUnderWay(context, g, each) {
  const [x, y, w] = [
    g.x(each.entered),
    g.trackTop(each.row, each.track),
    Math.max(1, (each.to - each.entered) * g.scale),
  ];
  context.fillStyle = colour("under-way");
  context.fillRect(x, y, w, g.track);
  if (each.key !== page.operation) return;
  context.strokeStyle = colour("text");
  context.lineWidth = each.rank === page.rank ? 2 : 1;
  context.strokeRect(x - 1, y - 1.5, w + 2, g.track + 3);
  context.lineWidth = 1;
}

function paintStood(context, g, each) {
  const [x, y, w] = [g.x(each.waitFrom), g.trackTop(each.row, each.track), each.waiting * g.scale];
  context.fillStyle = colour("waiting");
  context.fillRect(x, y, w, g.track);
  context.strokeStyle = colour("hatch");
  if (w > 4) hatch(context, x, y, w, g.track, 4);
  context.fillStyle = colour("phase-exposed");
  context.fillRect(x + w, y, Math.max(1, each.moving * g.scale), g.track);
}

// From the rank that came last to where each of the others could go on.
function paintJoin(context, g, join, isChosen) {
  const last = join.members.find((each) => each.rank === join.last);
  if (!last || join.members.length < 2) return;
  const longest = Math.max(...join.members.map((each) => each.waiting)) * g.scale;
  context.strokeStyle = context.fillStyle = colour(isChosen ? "text" : "arrow");
  context.globalAlpha = isChosen ? (join.members.length > 16 ? 0.5 : 1) : longest >= 4 ? 0.75 : 0.3;
  context.lineWidth = isChosen ? 1.5 : 1;
  const middle = (each) => g.trackTop(each.row, each.track) + g.track / 2;
  const [x0, y0] = [g.x(arrivedAt(last, join)), middle(last)];
  for (const each of join.members) {
    if (each === last) continue;
    const [x1, y1] = [g.x(each.to), middle(each)];
    if (Math.max(x0, x1) < g.gutter || Math.min(x0, x1) > g.width) continue;
    const down = Math.sign(y1 - y0);
    const tip = y1 - down * (g.track / 2 + 1);
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0, y0 + (tip - y0) * 0.6, x1, tip - (tip - y0) * 0.6, x1, tip - down * 3);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, tip);
    context.lineTo(x1 - 2.5, tip - down * 5);
    context.lineTo(x1 + 2.5, tip - down * 5);
    context.fill();
  }
  context.beginPath();
  context.arc(x0, y0, isChosen ? 3 : 2, 0, 7);
  context.fill();
  context.globalAlpha = 1;
  context.lineWidth = 1;
}

// At the foot: which part of the step is seen.
function paintOverview(context, g, height, model) {
  const whole = g.width - g.gutter;
  context.fillStyle = colour("line");
  context.fillRect(g.gutter, height - 5, whole, 3);
  context.fillStyle = colour("accent");
  context.fillRect(
    g.gutter + (g.from / model.length) * whole,
    height - 5,
    Math.max(4, ((g.to - g.from) / model.length) * whole),
    3,
  );
}

// What lies at a point: {rank, operation} or {rank, span} or {rank}.
function lanesAt(model, width, x, y) {
  const g = laneGeometry(model, width);
  const rank = model.ranks[Math.floor((y - LANES_TOP) / g.lane)];
  if (!rank || y < LANES_TOP) return null;
  const us = g.us(x);
  const slack = 2 / g.scale;
  if (y > g.top(rank.row) + 4 + g.phases + 1) {
    const hits = rank.operations.filter((each) => each.entered - slack <= us && us <= each.to + slack);
    const near = (each) => Math.abs(g.trackTop(rank.row, each.track) + g.track / 2 - y);
    if (hits.length) return { rank, operation: hits.reduce((a, b) => (near(b) < near(a) ? b : a)) };
  }
  const span = rank.spans.find((each) => each.from <= us && us <= each.to);
  return span ? { rank, span } : { rank };
}
