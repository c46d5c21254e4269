// What happened when: a lane for each run, over the hours since its first start, and a table of the same.

const ENDS = {
  completed: ["✓", "var(--good)"], preempted: ["‖", "var(--accent)"], interrupted: ["‖", "var(--accent)"],
  failed: ["✕", "var(--bad)"], killed: ["✕", "var(--bad)"],
};
const HAPPENED = {  // kind of event: sign, color, in words
  spike: ["▲", "var(--c4)", "spike"], skipped: ["▲", "var(--c7)", "skipped step"], rewound: ["↶", "var(--c5)", "rewind"],
  stage: ["◆", "var(--c2)", "stage of data"], straggler: ["●", "var(--c8)", "straggler"], failed: ENDS.failed.concat("failure"),
  preempted: ENDS.preempted.concat("preemption"), finished: ENDS.completed.concat("end"), saved: ["|", "var(--dim)", "save"],
};
const OF_STARTS = ["started", "resumed", "preempted", "failed", "finished"];  // starts and their ends repeat them
const since = hours => show.duration(3600 * hours);
const endOf = start => start.end === null ? "no end recorded" : start.end;

// Starts with the layout's color, and whether it is another than before.
function startsOf(run, colors) {
  return run.starts.map((start, i) => {
    const layout = show.layout(start.layout), before = i ? show.layout(run.starts[i - 1].layout) : layout;
    if (!(layout in colors)) colors[layout] = color([2, 0, 3, 4, 5, 1, 6, 7, 8][Object.keys(colors).length % 9]);
    const from = start.resumed_step ? `resumed at step ${number(start.resumed_step)}` : "from scratch";
    return {...start, layout, color: colors[layout], changed: layout !== before, from,
      tip: `Start ${i + 1} after ${since(start.hours)}, ${from}\nreached step ${number(start.step)} in ${since(start.last_seen_hours - start.hours)}\n` +
        `${start.ranks === null ? "" : `${plural(start.ranks, "rank")}, `}${layout}${layout !== before ? ` (before: ${before})` : ""}\n${endOf(start)}`};
  });
}

function timeline(parent, runs) {
  const end = Math.max(1e-6, ...runs.flatMap(run => [...run.starts.map(s => s.last_seen_hours), ...run.events.map(e => e.hours)])) * 1.01;
  const at = hours => `${Math.max(0, Math.min(100, 100 * hours / end))}%`, colors = {}, kinds = new Set();
  const box = element(parent, "div", {class: "lanes", role: "group", "aria-label": "What happened when; arrow keys step through it", "data-explore": ""});
  for (const run of runs) {
    if (runs.length > 1) element(box, "div", {class: "lane-name"}, run.name);
    const lane = element(box, "div", {class: "lane"});
    const sign = (hours, [text, color], tip, kind) => element(lane, "b", {class: kind, "data-tip": tip, style: `left: ${at(hours)}; color: ${color}`}, text);
    for (const start of startsOf(run, colors)) {
      const style = `left: ${at(start.hours)}; width: max(2px, ${100 * (start.last_seen_hours - start.hours) / end}%); background: ${start.color}`;
      element(lane, "i", {class: start.changed ? "start changed" : "start", "data-tip": start.tip, "data-start": start.resumed_step, style});
      const name = start.end === null ? null : start.end.split(":")[0];
      if (name in ENDS) sign(start.last_seen_hours, ENDS[name], `${endOf(start)}\nafter ${since(start.last_seen_hours)}, step ${number(start.step)}`, "end");
    }
    for (const event of run.events) {
      if (!(event.kind in HAPPENED) || OF_STARTS.includes(event.kind)) continue;
      kinds.add(event.kind);
      const [text, color, words] = HAPPENED[event.kind], step = event.step === null ? "" : ` at step ${number(event.step)}`;
      const tip = `${words}${step}, after ${since(event.hours)}\n${event.message}`;
      if (event.kind === "saved") element(lane, "u", {"data-tip": tip, "data-event": "saved", style: `left: ${at(event.hours)}`});
      else sign(event.hours, [text, color], tip, "event").dataset.event = event.kind;
    }
  }
  const scale = element(box, "div", {class: "lane-scale", "aria-hidden": "true"}), [unit, name] = end > 72 ? [24, "d"] : end > 1.5 ? [1, "h"] : end > .05 ? [1 / 60, "min"] : [1 / 3600, "s"];
  const most = end / unit, least = most / 8, power = 10 ** Math.floor(Math.log10(least)), step = [1, 2, 5, 10].find(n => n * power >= least) * power;
  for (let tick = 0; tick * step <= most * .97; tick++) element(scale, "span", {style: `left: ${at(tick * step * unit)}`}, `${rounded(tick * step)} ${name}`);
  legend(parent, Object.entries(colors));
  const signs = element(parent, "div", {class: "key"}), ends = [...new Set(runs.flatMap(run => run.starts.map(s => s.end === null ? "" : s.end.split(":")[0])))];
  for (const [text, color, words] of [...ends.filter(end => end in ENDS).map(end => [...ENDS[end], end]), ...[...kinds].map(kind => HAPPENED[kind])]) {
    element(element(signs, "span", {}, ""), "b", {style: `color: ${color}`}, text);
    signs.lastChild.append(` ${words}`);
  }
}

const MOST_ROWS = 500;
// [run, hours, what, step, message] of everything in order, the last first.
function happenings(runs) {
  const rows = [];
  for (const run of runs) {
    for (const start of startsOf(run, {})) {
      rows.push([run.name, start.hours, "start", start.resumed_step, `${start.from}, ${start.ranks === null ? "" : `${plural(start.ranks, "rank")}, `}${start.layout}` +
        (start.changed ? ", another layout" : "")]);
      if (start.end !== null) rows.push([run.name, start.last_seen_hours, start.end.split(":")[0], start.step, start.end.split(": ").slice(1).join(": ")]);
    }
    for (const event of run.events) if (!OF_STARTS.includes(event.kind))
      rows.push([run.name, event.hours, (HAPPENED[event.kind] || [0, 0, event.kind])[2], event.step, event.message]);
  }
  return rows.sort((a, b) => b[1] - a[1]);
}
function happened(parent, runs) {
  const rows = happenings(runs), columns = [["after"], ["step"], ["what", "left"], ["", "left wrap"]], cells = rows.slice(0, MOST_ROWS);
  if (rows.length > MOST_ROWS) element(parent, "p", {class: "dim"}, `The last ${number(MOST_ROWS)} of ${number(rows.length)}.`);
  table(parent, runs.length > 1 ? [["run", "left"], ...columns] : columns, cells.map(([run, hours, what, step, message]) =>
    [...(runs.length > 1 ? [run] : []), since(hours), or(step, number), what, message]), {label: "What happened, the last first", wide: true});
}
