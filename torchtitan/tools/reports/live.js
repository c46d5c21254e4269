// Keeps the page of `torchtitan watch` up to date: asks the server for what is new, and for details when zoomed.

const POLL_MS = 2000, RETRY_MS = 5000, DETAIL_POINTS = 2000;
const live = {at: null, timer: null, zoom: 0, status: null, clock: null, asking: null};

async function get(path) {
  const answer = await fetch(path, {cache: "no-store"});
  if (answer.status === 401) throw new Error("the server asks for its token: open the address that it printed");
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  return answer.json();
}

const follow = () => live.asking ||= ask().finally(() => { live.asking = null; });  // one question at a time
async function ask() {
  clearTimeout(live.timer);
  let wait = POLL_MS;
  try {
    const news = live.at === null ? {reload: true} : await get(`updates?after=${encodeURIComponent(live.at)}`);
    if (news.reload) await load(); else { live.at = news.at; news.runs.forEach(([i, more]) => merge(report.runs[i], more)); if (news.runs.length) refresh(); }
    say("Live", "good");
    live.clock.textContent = `, as of ${show.date(Date.now() / 1000).slice(11)}`;
  } catch (error) {
    wait = RETRY_MS;
    say(`Not live: ${error instanceof TypeError ? "the server can't be reached" : error.message}. Trying again.`, "bad");
  }
  live.timer = setTimeout(follow, document.hidden ? 5 * wait : wait);
}
function say(text, kind) {
  if (live.status.textContent === text) return;
  live.status.textContent = text;
  live.status.className = kind;
}

async function load() {
  const {at, report: all} = await get("data");
  live.at = at;
  report = all;
  prepare();
  refresh();
  if (view.zoom) details();
}

// Adds what a run has recorded since.
function merge(run, more) {
  Object.assign(run, more.head);
  extend({...run.axes, ...run.metrics}, {...more.axes, ...more.metrics}, run.axes.step, (key, values) => {
    if (key in run.axes) run.axes[key] = values; else run.metrics[key] = values;
  });
  for (const group of ["validation", "evals", "sources"]) for (const [name, curve] of Object.entries(more[group])) {
    run[group][name] ||= Object.fromEntries(Object.keys(curve).map(key => [key, []]));
    extend(run[group][name], curve, run[group][name].step, () => {});
  }
  if (more.experts) {
    run.experts ||= {step: [], load_max: [], entropy: []};
    extend(run.experts, more.experts, run.experts.step, () => {});
  }
  run.events.push(...more.events);
  for (const {prompt, ...texts} of more.samples) {
    if (!run.samples.some(one => one.prompt === prompt)) run.samples.push({prompt, step: [], text: [], end: []});
    const {step, text, end} = run.samples.find(one => one.prompt === prompt);
    extend({step, text, end}, texts, step, () => {});
  }
}
function extend(curves, more, steps, created) {
  const length = steps.length, last = length ? steps[length - 1] : -1, fresh = more.step.map((step, i) => [step, i]).filter(([step]) => step > last);
  for (const key of new Set([...Object.keys(curves), ...Object.keys(more)])) {
    if (curves[key] === null && !more[key]) continue;
    if (!curves[key]) created(key, curves[key] = new Array(length).fill(null));
    for (const [, i] of fresh) curves[key].push(more[key] ? more[key][i] : null);
  }
}

// The part in view, in as much detail as the files have.
function details() {
  const mine = ++live.zoom;
  if (!view.zoom) return;
  const [low, high] = view.zoom;
  setTimeout(async () => {
    if (mine !== live.zoom) return;
    for (const [i, run] of report.runs.entries()) {
      const steps = run.axes.step, xs = run.axes[view.x];
      if (view.hidden.has(run.path) || run.sampled <= 1 || !xs || !steps.length) continue;
      const ends = [low, high].map(x => view.x === "step" ? x : interpolate(xs, steps, x));
      const found = await get(`window?run=${i}&first=${Math.max(0, Math.floor(ends[0]))}&last=${Math.ceil(ends[1])}&points=${DETAIL_POINTS}`).catch(() => null);
      if (mine !== live.zoom) return;
      if (found) run.detail = found;
    }
    charts.forEach(chart => chart.update());
  }, 150);
}

function startLive() {
  const line = element(main, "p", {class: "live"});
  live.status = element(line, "span", {role: "status", class: "dim"}, "Reading the runs …");
  live.clock = element(line, "span", {class: "dim"});  // beside it, or it would be read aloud all the time
  listeners.zoom.push(details);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) follow(); });
  follow();
}
