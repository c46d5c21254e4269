// The page of runs: how they stand, how they compare, their curves, what happened, and where the time went.

const MAIN = [  // metrics with a chart of their own: key, title, unit, format, what else
  ["loss", "Training loss", "loss", show.loss, {log: true, height: 320, wide: true}],
  ["grad_norm", "Gradient norm", "norm", rounded, {log: true}],
  ["lr", "Learning rate", "learning rate", rounded, {zero: true, plain: true}],
  ["tokens_per_second", "Throughput", "tokens/s per device", show.rate, {zero: true}],
  ["mfu", "MFU", "percent of the peak rate", show.percent, {zero: true}],
  ["memory_gib", "Peak memory", "GiB per device", show.gib, {zero: true, plain: true}],
  ["gpu_utilization_pct", "GPU utilization", "percent, of rank 0", show.percent, {zero: true}],
  ["gpu_power_w", "GPU power", "watts, of rank 0", rounded, {zero: true}],
  ["gpu_temperature_c", "GPU temperature", "°C, of rank 0", rounded],
];
const RUN_COLORS = [0, 3, 2, 7, 5, 6, 8, 1, 4, 9].map(i => `var(--c${i})`);
const DASHES = [undefined, [8, 4], [2, 3], [8, 3, 2, 3], [14, 4]];
const STATES = {running: "accent", completed: "good", failed: "bad", killed: "bad"};
let report = data.report, parts = null;

const visible = () => report.runs.filter(run => !view.hidden.has(run.path));
function prepare() {
  report.runs.forEach((run, i) => { run.color = RUN_COLORS[i % RUN_COLORS.length]; run.dash = DASHES[Math.floor(i / RUN_COLORS.length) % DASHES.length]; });
  if (!known(view.x)) view.x = "step";
}

// Draws what `box` holds anew if `state` is another than before; the focus and opened details stay.
function redraw(box, state, draw) {
  const now = JSON.stringify(state);
  if (box.drawn === now) return;
  box.drawn = now;
  const stops = () => [...box.querySelectorAll("[tabindex], summary, button, input, select")], had = stops().indexOf(document.activeElement);
  const open = [...box.querySelectorAll("details")].map(one => one.open);
  box.replaceChildren();
  draw(box);
  box.querySelectorAll("[data-explore]").forEach(explore);
  box.querySelectorAll("details").forEach((one, i) => { one.open = open[i] || false; });
  if (had >= 0) stops()[had]?.focus({preventScroll: true});
}

function start() {
  parts = {};
  element(main, "h1", {}, "");
  for (const name of ["heads", "comparison", "controls", "curves", "scores", "samples", "events", "time", "setup", "log"]) parts[name] = element(main, "section", {class: name});
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
}
function paper(on) {  // canvases keep the colors that they were drawn in
  document.documentElement.style.colorScheme = on ? "light" : "";
  charts.forEach(chart => chart.plot && chart.plot.redraw(false));
}

function refresh() {
  if (!parts) start();
  const runs = report.runs, one = runs.length === 1;
  main.querySelector("h1").textContent = one ? runs[0].name : plural(runs.length, "run");
  const heads = runs.map(({name, state, message, step, total_steps, tokens, last_seen, eta_s, layout, ranks, devices, goodput, latest, description}) =>
    [name, state, message, step, total_steps, tokens, last_seen, eta_s, layout, ranks, devices, goodput, latest, description]);
  redraw(parts.heads, heads, one ? cards : overview);
  redraw(parts.comparison, [report.comparison, report.differences], comparison);
  redraw(parts.controls, [runs.map(run => run.path), Object.keys(AXES).filter(known)], controls);
  const names = available();
  redraw(parts.curves, names, box => curves(box, names));
  charts.forEach(chart => chart.update());
  controlled();
  redraw(parts.scores, runs.map(run => run.evals), scores);
  redrawSamples();
  redraw(parts.events, runs.map(run => [run.name, run.starts, run.events]), events);
  redraw(parts.time, runs.map(run => [run.name, run.goodput]), time);
  redraw(parts.setup, runs.map(run => [run.name, run.settings]), setup);
  redraw(parts.log, runs.map(run => [run.name, run.log]), log);
}

// ---- how the runs stand

const validated = run => Object.entries(run.validation).map(([name, curve]) => [name, curve.loss.at(-1)]);
const moment = (run, word = "") => run.eta_s === null || run.eta_s === undefined ? or(run.last_seen, at => word + show.date(at)) : `${show.duration(run.eta_s)} left`;
const ended = run => !["running", "killed", "unknown"].includes(run.state);
const percentOf = run => or(run.goodput.percent, show.percent);

function cards(box) {
  const [run] = report.runs, latest = run.latest, made = element(box, "div", {class: "cards"});
  const card = (key, value, name, more, kind) => {
    const one = element(made, "div");
    element(one, "b", {"data-figure": key, class: kind}, value);
    element(one, "span", {}, name);
    if (more) element(one, "span", {class: "dim"}, more);
    return one;
  };
  const share = run.total_steps ? run.step / run.total_steps : null;
  card("state", run.state, moment(run, ended(run) ? "ended " : "last seen "), run.message, STATES[run.state]);
  const progress = card("step", number(run.step), run.total_steps === null ? "steps" : `of ${plural(run.total_steps, "step")}`);
  if (share !== null) element(progress, "progress", {value: Math.min(1, share), "aria-label": `${percent(share, 1)} of the steps`});
  card("loss", or(latest.loss, show.loss), "training loss", validated(run).map(([name, loss]) => `validation${name ? ` ${name}` : ""} ${show.loss(loss)}`).join(", "));
  card("tokens", or(run.tokens, show.tokens), "tokens");
  card("tokens_per_second", or(latest.tokens_per_second, show.rate), "tokens/s per device");
  if (latest.mfu !== null && latest.mfu !== undefined) card("mfu", show.percent(latest.mfu), "MFU");
  if (latest.memory_gib) card("memory_gib", show.gib(latest.memory_gib), "peak memory per device");
  card("goodput", percentOf(run), "goodput", plural(run.starts.length, "start"));
  const devices = Object.entries(run.devices).map(([name, n]) => `${number(n)} ${name}`).join(", ");
  const {git} = run.settings, commit = git ? `commit ${git.slice(0, 10)}${git.endsWith("-dirty") ? " with uncommitted changes" : ""}` : "";
  const about = [run.description, [run.ranks ? plural(run.ranks, "rank") : "", show.layout(run.layout), devices].filter(Boolean).join(", "), commit];
  element(box, "p", {class: "dim"}, about.filter(Boolean).join("; "));
  if (run.path !== run.name) element(element(box, "p", {class: "dim"}), "code", {}, run.path);
}

function overview(box) {
  const columns = [["run", "left"], ["state", "left"], ["step"], ["loss"], ["validation"], ["tokens"], ["tokens/s"], ["MFU"], ["goodput"], ["left or last seen"], ["layout", "left"]];
  const made = table(box, columns, report.runs.map(run => [run.name, [run.state, run.message], run.total_steps ? [number(run.step), `of ${number(run.total_steps)}`] : number(run.step),
    or(run.latest.loss, show.loss), validated(run).map(([, loss]) => show.loss(loss)).join(", ") || "–", or(run.tokens, show.tokens), or(run.latest.tokens_per_second, show.rate),
    or(run.latest.mfu, show.percent), percentOf(run), moment(run), show.layout(run.layout)]), {label: "How the runs stand"});
  made.querySelectorAll("tbody tr").forEach((row, i) => {
    const run = report.runs[i];
    row.cells[0].prepend(element(row.cells[0], "i", {class: "swatch", style: `background: ${run.color}`}));
    row.cells[1].className = `left ${STATES[run.state] || ""}`;
    row.dataset.run = run.name;
  });
}

function comparison(box) {
  if (report.runs.length < 2) return;
  if (report.comparison.length) {
    element(box, "h2", {}, `Compared with ${report.runs[0].name}`);
    const list = element(box, "ul", {class: "sentences"});
    for (const one of report.comparison) {
      const line = element(list, "li", {class: one.significant ? "" : "dim"});
      element(line, "b", {}, `${one.run}: `);
      line.append(one.text);
    }
  }
  const rows = report.differences;
  element(box, "h2", {}, "Differences of configuration");
  if (!rows.length) { element(box, "p", {class: "dim"}, "None."); return; }
  const holder = rows.length > 12 ? element(box, "details") : box;
  if (holder !== box) element(holder, "summary", {}, plural(rows.length, "key"));
  const made = table(holder, [["key", "left code"], ...report.runs.map(run => [run.name, "left wrap"])], rows.map(row => [row.key, ...row.values.map(v => v === null ? "unset" : String(v))]),
    {label: "Differences of configuration"});
  made.querySelectorAll("tbody tr").forEach((row, i) => rows[i].values.forEach((value, j) => {
    if (value === null) row.cells[j + 1].classList.add("dim");
    else if (value !== rows[i].values[0]) row.cells[j + 1].classList.add("other");
  }));
}

// ---- controls

function controls(box) {
  const group = element(box, "fieldset", {class: "choice"}), changed = () => charts.forEach(chart => chart.update());
  element(group, "legend", {}, "Against");
  for (const [key, axis] of Object.entries(AXES)) {
    const label = element(group, "label"), input = element(label, "input", {type: "radio", name: "axis", value: key});
    input.checked = key === view.x;
    input.disabled = !known(key);
    label.append(axis.name);
    input.addEventListener("change", () => { view.x = key; zoomTo(null); controlled(); });
  }
  const smoothing = element(box, "label", {class: "slider"}, "Smoothing ");
  const slider = element(smoothing, "input", {type: "range", min: 0, max: 100, step: 1, value: view.smooth, "data-control": "smooth"});
  element(smoothing, "output");
  slider.addEventListener("input", () => { view.smooth = Number(slider.value); changed(); controlled(); });
  for (const [key, text] of [["log", "Log scale"], ["clip", "Clip outliers"]]) {
    const label = element(box, "label"), input = element(label, "input", {type: "checkbox", "data-control": key});
    input.checked = view[key];
    label.append(text);
    input.addEventListener("change", () => { view[key] = input.checked; changed(); });
  }
  const all = element(box, "button", {type: "button", "data-control": "all"}, "Show all");
  all.addEventListener("click", () => zoomTo(null));
  if (report.runs.length < 2) return;
  const keys = element(box, "div", {class: "toggles", role: "group", "aria-label": "Runs shown"});
  for (const run of report.runs) {
    const button = element(keys, "button", {type: "button", "aria-pressed": !view.hidden.has(run.path), "data-toggle": run.name});
    element(button, "i", {class: "swatch", style: `background: ${run.color}`});
    button.append(run.name);
    button.addEventListener("click", () => {
      if (!view.hidden.delete(run.path)) view.hidden.add(run.path);
      button.setAttribute("aria-pressed", !view.hidden.has(run.path));
      changed();
      redrawSamples();
    });
  }
}
function controlled() {  // what follows from the view
  const box = parts.controls, slider = box.querySelector("[data-control=smooth]"), words = view.smooth ? `over ${plural(Math.max(1, Math.round(span())), "step")}` : "off";
  box.querySelector("output").textContent = words;
  slider.setAttribute("aria-valuetext", words);
  box.querySelector("[data-control=all]").disabled = !view.zoom;
}
listeners.zoom.push(controlled);

// ---- curves

const recorded = values => values && values.some(value => value !== null);
function available() {
  const runs = report.runs, names = key => [...new Set(runs.flatMap(run => Object.keys(run[key] || {})))];
  const metrics = names("metrics").filter(key => runs.some(run => recorded(run.metrics[key])));
  return {metrics, validation: names("validation"), evals: names("evals"), sources: names("sources"), experts: runs.some(run => run.experts)};
}

// Curves of a metric, one for each run.
const ofMetric = (key, plain) => () => visible().flatMap(run => {
  const {axes, metrics} = run;
  return metrics[key] && axes[view.x] ? [{name: run.name, run: run.path, color: run.color, dash: run.dash, steps: axes.step, xs: axes[view.x], ys: metrics[key], mean: !plain}] : [];
});
// Curves by name of each run, such as validation sets. Of a single run, names have colors; of several, dashes.
const ofNames = (names, curvesOf, mean) => () => {
  const one = report.runs.length === 1;
  return visible().flatMap(run => names.flatMap((name, i) => {
    const curve = curvesOf(run, name);
    if (!curve || !curve[0].length) return [];
    const label = [one ? "" : run.name, name].filter(Boolean).join(", ") || run.name;
    return [{name: label, run: run.path, color: one ? RUN_COLORS[i % RUN_COLORS.length] : run.color, dash: one ? undefined : DASHES[i % DASHES.length],
      steps: curve[0], xs: curve[0].map(step => place(run, step)), ys: curve[1], errors: curve[2], mean}];
  }));
};
function keyOfNames(parent, names) {
  if (names.length < 2) return;
  const made = element(parent, "div", {class: "key"}), one = report.runs.length === 1;
  names.forEach((name, i) => {
    const entry = element(made, "span"), svg = element(entry, "svg", {viewBox: "0 0 28 8", class: "line", "aria-hidden": "true"});
    element(svg, "path", {d: "M0 4H28", "stroke-width": 2, stroke: one ? RUN_COLORS[i % RUN_COLORS.length] : "currentColor", "stroke-dasharray": one ? null : (DASHES[i % DASHES.length] || []).join(" ")});
    entry.append(name);
  });
}

function curves(box, names) {
  charts.splice(0).forEach(chart => chart.plot && chart.plot.destroy());
  element(box, "h2", {}, "Curves");
  element(box, "p", {class: "dim help"}, "Drag to zoom all charts, double-click for the whole. With the keyboard: arrows along a curve, + and - to zoom, Escape for the whole.");
  const wide = element(box, "div"), pair = element(box, "div", {class: "pair"});
  const metric = (parent, [key, title, label, format, more = {}]) =>
    curveChart(parent, {key, title, label, format, tick: rounded, curves: ofMetric(key, more.plain), ...more, marks: key === "loss" ? turns : undefined});
  for (const one of MAIN) if (names.metrics.includes(one[0])) metric(one[4].wide ? wide : pair, one);
  if (!names.metrics.includes("loss")) element(wide, "p", {class: "dim"}, "No training step is recorded yet.");
  if (names.validation.length) {
    const few = report.runs.every(run => Object.values(run.validation).every(curve => curve.step.length < 10));
    const chart = curveChart(few ? pair : wide, {key: "validation", title: "Validation loss", label: "loss", format: show.loss, tick: rounded, log: true, dots: true, height: few ? 210 : 260,
      curves: ofNames(names.validation, (run, name) => run.validation[name] && [run.validation[name].step, run.validation[name].loss])});
    keyOfNames(chart.box, names.validation);
  }
  if (names.sources.length) {
    const chart = curveChart(wide, {key: "sources", title: "Loss by source", label: "loss", format: show.loss, tick: rounded, log: true, height: 260,
      curves: ofNames(names.sources, (run, name) => run.sources[name] && [run.sources[name].step, run.sources[name].loss], true)});
    keyOfNames(chart.box, names.sources);
  }
  if (names.experts) for (const [key, title, label] of [["load_max", "Load of the busiest expert", "times the mean"], ["entropy", "Balance of experts", "relative entropy"]]) {
    curveChart(pair, {key, title, label, format: rounded, curves: ofNames([""], run => run.experts && [run.experts.step, run.experts[key]], true)});
  }
  benchmarks(box, names.evals);
  const shown = MAIN.map(([key]) => key), others = names.metrics.filter(key => !shown.includes(key) && !key.startsWith("expert_"));
  if (!others.length) return;
  later(box, plural(others.length, "other metric"), holder => others.map(key => metric(holder, [key, key.replaceAll("_", " "), "", rounded])));
}

// A chart of each score of benchmarks; checkpoints' scores are another curve in the same chart.
const BENCHMARKS = 8;  // charts that are shown without being asked for
const scoreOf = name => name.split(" (")[0], score = x => Math.abs(x) < 1000 ? show.loss(x) : rounded(x);
function benchmarks(box, names) {
  const titles = [...new Set(names.map(scoreOf))];
  const chart = (parent, title) => {
    const own = names.filter(name => scoreOf(name) === title), words = own.map(name => name === title ? "during training" : name.slice(title.length + 2, -1));
    const values = (run, word) => { const one = run.evals[own[words.indexOf(word)]]; return one && [one.step, one.value, one.error]; };
    const made = curveChart(parent, {key: `eval/${title}`, title, label: "score", format: score, tick: rounded, dots: true, curves: own.length > 1 || own[0] !== title ? ofNames(words, values) :
      ofNames([""], run => values(run, words[0]))});
    keyOfNames(made.box, words);
    return made;
  };
  const pair = element(box, "div", {class: "pair"}), rest = titles.slice(BENCHMARKS);
  for (const title of titles.slice(0, BENCHMARKS)) chart(pair, title);
  if (rest.length) later(box, plural(rest.length, "other score"), holder => rest.map(title => chart(holder, title)));
}
// Charts that are made when somebody asks for them.
function later(box, text, make) {
  const more = element(box, "details"), holder = element(more, "div", {class: "pair"});
  more.prepend(element(more, "summary", {}, text));
  more.addEventListener("toggle", () => { if (more.open && !holder.children.length) make(holder).forEach(chart => chart.update()); });
}

// The last value of each score.
function scores(box) {
  const names = [...new Set(report.runs.flatMap(run => Object.keys(run.evals)))];
  if (!names.length) return;
  const last = curve => curve ? [score(curve.value.at(-1)) + (curve.error.at(-1) ? ` ± ${score(curve.error.at(-1))}` : ""), `step ${number(curve.step.at(-1))}`] : "–";
  element(box, "h2", {}, "Benchmarks");
  element(box, "p", {class: "dim"}, "The last score of each, ± its standard error.");
  const holder = names.length > 2 * BENCHMARKS ? element(box, "details") : box;
  if (holder !== box) element(holder, "summary", {}, plural(names.length, "score"));
  table(holder, [["score", "left wrap"], ...report.runs.map(run => [run.name])], names.map(name => [name, ...report.runs.map(run => last(run.evals[name]))]), {label: "Scores of benchmarks"});
}

// Where the loss may turn: starts, rewinds, stages of data.
function turns() {
  const found = [];
  for (const run of visible()) {
    const name = report.runs.length > 1 ? `${run.name}: ` : "", add = (hours, step, text, color) => {
      const x = view.x === "hours" ? hours : step === null ? null : place(run, step);
      if (x !== null) found.push({x, text: name + text, color});
    };
    run.starts.slice(1).forEach(start => add(start.hours, start.resumed_step, `start from step ${number(start.resumed_step)}`, "var(--dim)"));
    for (const event of run.events) if (event.kind === "rewound" || event.kind === "stage" || event.kind === "spike") {
      add(event.hours, event.step, event.message || HAPPENED[event.kind][2], HAPPENED[event.kind][1]);
    }
  }
  return found;
}

// ---- what happened, and where the time went

function events(box) {
  const runs = report.runs.filter(run => run.starts.length || run.events.length);
  if (!runs.length) return;
  element(box, "h2", {}, "What happened");
  element(box, "p", {class: "dim"}, "Time since the first start of each run. Bars are starts, colored by layout; ticks below them are saves.");
  timeline(box, runs);
  const details = element(box, "details");
  element(details, "summary", {}, "As a table");
  happened(details, runs);
}

function time(box) {
  const kinds = Object.keys(data.kinds), total = run => kinds.reduce((sum, kind) => sum + (run.goodput.seconds[kind] || 0), 0);
  const runs = report.runs.filter(run => total(run) > 0), used = kinds.filter(kind => runs.some(run => run.goodput.seconds[kind] > 0));
  if (!runs.length) return;
  element(box, "h2", {}, "Where the time went");
  element(box, "p", {class: "dim"}, "Goodput is the share of training steps whose result is kept.");
  const colors = Object.fromEntries(kinds.map((kind, i) => [data.kinds[kind], color([2, 6, 4, 3, 8, 0, 1, 5, 9][i])]));
  const part = (run, kind) => (run.goodput.seconds[kind] || 0) / total(run);
  const made = bars(box, runs.map(run => ({label: run.name, parts: used.map(kind => [data.kinds[kind], part(run, kind)]), values: [show.duration(total(run)), percentOf(run)]})),
    share => percent(share, 1), {colors, label: "Share of each kind of time"});
  made.dataset.chart = "time";
  legend(box, used.map(kind => [data.kinds[kind], colors[data.kinds[kind]]]));
  const details = element(box, "details");
  element(details, "summary", {}, "As a table");
  table(details, [["", "left"], ...runs.flatMap(run => [[run.name]])], [...used.map(kind => [data.kinds[kind], ...runs.map(run => [show.duration(run.goodput.seconds[kind] || 0), percent(part(run, kind), 1)])]),
    ["total", ...runs.map(run => show.duration(total(run)))]], {label: "Time by kind"});
}

// ---- how each run was set up, and the end of its log

// What `draw` makes of each run that has it; of several runs, below their names.
function perRun(box, key, draw) {
  const runs = report.runs.filter(run => Object.keys(run[key]).length);
  for (const run of runs) {
    const holder = report.runs.length > 1 ? element(box, "details") : box;
    if (holder !== box) element(holder, "summary", {}, run.name);
    draw(holder, run[key], run);
  }
  return runs.length;
}
function setup(box) {
  element(box, "h2", {}, "Configuration");
  element(box, "p", {class: "dim"}, "What isn't the default, and what it ran on.");
  perRun(box, "settings", (holder, settings, run) =>
    table(holder, [["key", "left wrap"], ["value", "left wrap"]], Object.entries(settings).map(([key, value]) => [key, String(value)]), {label: `Configuration of ${run.name}`}));
}
function log(box) {
  element(box, "h2", {}, "End of the log");
  if (!perRun(box, "log", (holder, lines) => element(holder, "pre", {class: "sample"}, lines.join("\n")))) box.replaceChildren();
}

if (isFrame) passOn(); else { prepare(); refresh(); if (data.every) follow(); }
