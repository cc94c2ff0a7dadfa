// One recorded step as the lanes show it: what each rank did when, and which operations belong together.

// Times in microseconds since the step began; by rank its spans and operations, by key the collectives.
function laneModel(step, words) {
  const ranks = step.ranks.map((each, row) => ({
    rank: each.rank,
    row,
    began: each.began_us,
    ended: each.ended_us,
    says: each.says, // of a step that was not ended: what it was in
    step: each.step, // and which it was: one rank may be a step behind
    isCulprit: each.culprit,
    spans: each.spans.map(([phase, from, to]) => ({ phase, from, to })),
    operations: placed(each.ops.map((values) => operation(values, words, each.rank, row))),
  }));
  const length = Math.max(1, step.ended_us - step.began_us, ...ranks.map((each) => each.ended));
  return { step, length, ranks, joins: joinsOf(ranks, step.joins) };
}

// late: of what its thread stood, for the last to arrive.
function operation([word, key, entered, left, waitFrom, waited, late], words, rank, row) {
  const about = words[word] || { text: "operation", site: "", label: "", group: "", bytes: 0 };
  const stood = waitFrom >= 0 && waited > 0;
  const to = Math.max(left, entered, stood ? waitFrom + waited : 0);
  return {
    about,
    key,
    rank,
    row,
    entered,
    left,
    to,
    stood,
    waitFrom: stood ? waitFrom : to,
    waited: stood ? waited : 0,
    waiting: stood ? late : 0,
    moving: stood ? waited - late : 0, // its data
    track: 0,
  };
}

// Operations that are open at the same time lie below each other.
function placed(operations) {
  const free = [];
  for (const each of [...operations].sort((a, b) => a.entered - b.entered)) {
    let track = free.findIndex((until) => until <= each.entered);
    if (track < 0) track = free.length;
    free[track] = each.to;
    each.track = track;
  }
  return operations.sort((a, b) => a.entered - b.entered);
}

function joinsOf(ranks, given) {
  const joins = new Map();
  for (const each of ranks.flatMap((rank) => rank.operations)) {
    if (!joins.has(each.key))
      joins.set(each.key, {
        key: each.key,
        about: each.about,
        members: [],
        last: null,
        real: null,
        waited: null,
        bandwidth: 0,
      });
    joins.get(each.key).members.push(each);
  }
  for (const [key, last, real, waited, bandwidth] of given) {
    const join = joins.get(key);
    if (!join) continue;
    const isMissed = last !== null && !join.members.some((each) => each.rank === last); // it never came
    Object.assign(join, { last, real, waited, bandwidth, isMissed });
  }
  for (const join of joins.values()) join.waited = join.members.reduce((sum, each) => sum + each.waiting, 0);
  return joins;
}

// When a rank was there: where all stood still, from then on it did; else from then on its part was under way.
const arrivedAt = (operation, join) =>
  join.members.every((each) => each.stood) ? operation.waitFrom : operation.entered;

// What is said of an operation, by pointer and by keyboard alike; the first line is the title.
function operationLines(operation, join) {
  const { about, waiting, moving } = operation;
  const lines = [about.text];
  const place = [about.site && `at ${about.site}`, about.label].filter(Boolean).join(" \u00b7 ");
  if (place) lines.push(place);
  lines.push(
    `rank ${operation.rank}: started at ${time(operation.entered)}, open for ${time(operation.to - operation.entered)}`,
  );
  if (operation.stood)
    lines.push(`stood ${time(operation.waited)}: ${time(waiting)} waiting, ${time(moving)} communication`);
  else if (about.unseen) lines.push("who stands in it, and until when, is not known");
  else if (!isOpen(laneNow.step)) lines.push("did not stand still for it: hidden behind its own work");
  if (about.bytes) lines.push(size(about.bytes) + (join?.bandwidth ? ` at ${size(join.bandwidth)}/s` : ""));
  if (join?.last !== null && join?.last !== undefined) {
    if (join.isMissed) lines.push(`rank ${join.last} never came`);
    else if (operation.rank !== join.last) lines.push(`last to arrive: rank ${join.last}`);
    else lines.push(`arrived last${join.waited ? `: the others waited ${time(join.waited)} in all` : ""}`);
  }
  return lines;
}

function spanLines(rank, span) {
  const [took, whole] = [span.to - span.from, Math.max(1, rank.ended - rank.began)];
  const isLast = rank.says && span === rank.spans.at(-1);
  return [
    ...(isLast ? [rank.says] : []),
    ...(isLast && span.phase === "open" ? [] : [PHASE_NAMES[span.phase] || span.phase]),
    `rank ${rank.rank}, ${time(took)} (${percent(took / whole)} of its step)`,
    `from ${time(span.from)} to ${time(span.to)}`,
  ];
}
