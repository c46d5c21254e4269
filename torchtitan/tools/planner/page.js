// The page of a plan: each section draws a part of its JSON.
const {memory, time, run} = data;
const layoutOf = layout => Object.entries(layout).filter(([, n]) => n > 1).map(([axis, n]) => `${axis} ${n}`).join(" x ") || "one rank";
const likely = chance => chance < .01 ? "< 1 %" : chance > .99 ? "> 99 %" : percent(chance);
const range = ([low, high], format) => `${format(low)} to ${format(high)}`;
const KINDS = {fits: {name: "fits", shape: SHAPES.dot, color: "var(--accent)", alpha: .5, size: .6}};

heading();
figures();
origin();
memoryOfRanks();
timeParts();
costs();
if (data.search) search();
if (data.sizes) numbers();
mesh();
if (data.notes.length) {
  const list = element(section("Notes"), "ul");
  for (const note of data.notes) element(list, "li", {}, note);
}
document.querySelectorAll("[data-explore]").forEach(explore);

function heading() {
  element(main, "h1", {}, `${data.model} on ${number(data.world)} x ${data.hardware}`);
  const pipeline = data.schedule ? `, ${plural(data.microbatches, "microbatch", "es")}, ${data.schedule}` : "";
  const batches = data.accumulation > 1 ? ` x ${data.accumulation} accumulation steps` : "";
  element(main, "p", {}, `${layoutOf(data.layout)}; ${number(data.global_batch_size)} x ${number(data.seq_len)} tokens per step, ` +
    `${plural(data.local_batch_size, "row")} per rank${batches}${pipeline}; checkpointing ${data.activation_checkpointing}`);
  element(main, "p", {class: "dim"}, `${plural(data.nodes, "node")} of ${plural(data.gpus_per_node, "GPU")}: ${data.hardware_description}`);
}

function figures() {
  const cards = element(main, "div", {class: "cards"}), ranges = time.ranges;
  const card = (key, value, name, more, kind) => {
    const made = element(cards, "div");
    element(made, "b", {"data-figure": key, class: kind}, value);
    element(made, "span", {}, name);
    element(made, "span", {class: "dim"}, more);
  };
  const whole = x => number(x), tenth = x => number(x, x < 10 ? 2 : 1);
  card("tokens_per_second_per_gpu", whole(data.tokens_per_second_per_gpu), "tokens/s per GPU", range(data.range_tokens_per_second_per_gpu, whole));
  card("mfu", time.mfu === null ? "-" : percent(time.mfu, 1), "MFU", time.mfu === null ? "only of bf16" : range(ranges.mfu, x => percent(x, 1)));
  card("step_s", significant(time.step_s), "seconds per step", range(ranges.step_s, significant));
  if (data.schedule) card("bubble", percent(time.bubble, 1), "pipeline bubble", "of the step");
  card("peak_gib", tenth(data.peak_gib), "GiB at the peak", range(memory.range_gib, tenth));
  card("chance_to_fit", `${data.fits ? "✓" : "✗"} ${likely(data.chance_to_fit)}`, "chance to fit",
    `in ${tenth(memory.usable_gib)} GiB of a GPU`, data.fits ? "good" : "bad");
  card("gpu_hours", significant(run.gpu_hours), "GPU-hours", range(run.range_gpu_hours, significant));
  card("hours", duration(run.hours), `for ${large(run.tokens, "tokens")}, ${plural(Math.round(run.steps), "step")}`, range(run.range_hours, duration));
  element(main, "p", {class: "dim"}, "9 of 10 such runs are within the ranges: " +
    `speed ±${percent(time.band)}, memory ±${percent(memory.band)}.`);
}

function origin() {
  if (!data.command) return;
  const made = element(main, "section", {"aria-label": "Origin"});
  element(made, "p", {class: "dim"}, `Planned on ${data.date.slice(0, 10)} at ${data.date.slice(11, 16)} UTC with`);
  const command = element(made, "pre", {tabindex: 0, "data-figure": "command", class: "words"});
  data.command.split(" ").forEach((word, i) => { if (i) command.append(" "); element(command, "span", {}, word); });
  const toml = element(made, "details");
  element(toml, "summary", {}, "The configuration as TOML");
  element(toml, "pre", {tabindex: 0, "data-figure": "toml"}, data.toml);
}

function memoryOfRanks() {
  const made = section("Memory by pipeline rank", `At the peak. The dashed line marks what the allocator can use: ${number(memory.usable_gib, 1)} GiB.`);
  const parts = [...new Set(memory.ranks.flatMap(rank => Object.keys(rank.parts_gib)))];
  const colors = Object.fromEntries(parts.map((part, i) => [part, color(i)]));
  const name = rank => data.layout.pp > 1 ? `pp rank ${rank.pp_rank}` : "every rank";
  bars(made, memory.ranks.map(rank => ({label: name(rank), parts: Object.entries(rank.parts_gib), values: [`${number(rank.reserved_gib, 1)} GiB`]})),
    gib => `${number(gib, 2)} GiB`, {colors, limit: memory.usable_gib, label: "Memory of each pipeline rank by part"});
  legend(made, parts.map(part => [part, colors[part]]));
  const details = element(made, "details");
  element(details, "summary", {}, "As a table");
  table(details, [["", "left"], ...parts.map(part => [part]), ["peak"], ["headroom"]], memory.ranks.map(rank => [name(rank),
    ...parts.map(part => number(rank.parts_gib[part] || 0, 1)), number(rank.reserved_gib, 1),
    number(memory.usable_gib - rank.reserved_gib, 1)]), {label: "Memory by pipeline rank"});
}

function timeParts() {
  const made = section("Where the step's time goes");
  const waits = ["pipeline bubble", "waiting for the slowest node", "host"];
  const kind = part => waits.includes(part) ? "waiting" : /communication|host memory|offload/.test(part) ? "communication" : "compute";
  const colors = {compute: "var(--c2)", communication: "var(--c3)", waiting: "var(--c9)"};
  const parts = Object.entries(time.parts_s);
  bars(made, parts.map(([part, s]) => ({label: part, parts: [[part, s]], values: [seconds(s), percent(s / time.step_s, 1)]})),
    s => `${seconds(s)}, ${percent(s / time.step_s, 1)} of the step`,
    {colors: Object.fromEntries(parts.map(([part]) => [part, colors[kind(part)]])), label: "Seconds of a step by part"});
  legend(made, Object.entries(colors));
}

function costs() {
  const made = section("The largest costs, and what would lower them");
  for (const cost of data.costs) {
    element(made, "h3", {}, `${percent(cost.share, 1)} ${cost.part}`);
    if (!cost.changes.length) continue;
    const settings = change => Object.entries(change.settings).map(([key, value]) => `${key} = ${JSON.stringify(value)}`).join(", ");
    table(made, [["change", "left wrap"], ["speed"], ["GiB"]], cost.changes.map(c => [settings(c),
      `${c.gain < 0 ? "" : "+"}${percent(c.gain, 1)}`, number(c.peak_gib, 1)]),
      {label: `Changes that lower ${cost.part}`, wide: true});
  }
}

function search() {
  const {seen, points: all, best} = data.search, limit = memory.usable_gib;
  const made = section("The search", `${number(seen)} configurations. Diamonds are the rows of the table: ` +
    "point at either to see the other. Drag to zoom, double-click to see all.");
  const text = (gib, speed) => `${number(speed)} tokens/s per GPU, ${number(gib, 1)} GiB`;
  const dots = all.map(([gib, speed]) => ({x: gib, y: speed, kind: "fits", tip: text(gib, speed)}));
  const proposals = best.map((b, i) => ({x: b.peak_gib, y: b.tokens_per_second_per_gpu, kind: b.baseline ? "own" : "best", key: i,
    tip: `${layoutOf(b.layout)}\n${text(b.peak_gib, b.tokens_per_second_per_gpu)}`}));
  const highlight = key => rows.querySelectorAll("tr[data-key]").forEach(row => row.classList.toggle("on", row.dataset.key === String(key)));
  const drawn = points(made, {
    x: {label: "peak memory, GiB"}, y: {label: "tokens/s per GPU"}, points: [...dots, ...proposals], height: 340,
    limit: {axis: "x", value: limit, text: `limit ${number(limit, 1)} GiB`},
    label: "Speed and memory of the configurations found; arrow keys step through the proposals", onselect: highlight,
    kinds: {...KINDS, best: {name: "proposed", shape: SHAPES.diamond, color: "var(--c4)", edge: "var(--text)"}, own: {name: "as configured", shape: SHAPES.ring, color: "var(--text)"}},
  });
  const columns = [["layout", "left wrap", b => [layoutOf(b.layout) + (b.baseline ? " (as configured)" : ""), b.why]],
    ["tokens/s/GPU", "", b => number(b.tokens_per_second_per_gpu)],
    ["at least", "", b => number(b.range_tokens_per_second_per_gpu[0])], ["GiB", "", b => number(b.peak_gib, 1)],
    ["chance to fit", "", b => b.chance_to_fit === undefined ? null : likely(b.chance_to_fit)],
    ["rows", "", b => `${b.local_batch_size} x ${b.accumulation}`],
    ["schedule", "left", b => b.schedule ? `${b.schedule}, ${plural(b.microbatches, "microbatch", "es")}` +
      (b.stages_per_rank > 1 ? `, ${b.stages_per_rank} stages per rank` : "") : null],
    ["checkpointing", "left", b => b.activation_checkpointing]]
    .filter(([, , cell]) => best.some(b => cell(b)));  // without what no row has
  const rows = table(made, columns, best.map(b => columns.map(([, , cell]) => cell(b) || "-")),
    {key: i => i, label: "Configurations proposed"});
  for (const row of rows.querySelectorAll("tr[data-key]")) {
    for (const event of ["focus", "pointerenter"]) row.addEventListener(event, () => drawn.select(Number(row.dataset.key)));
    for (const event of ["blur", "pointerleave"]) row.addEventListener(event, () => drawn.select());
  }
}

function numbers() {
  const {sizes} = data, worlds = sizes.map(p => p.world);
  const made = element(section("Other numbers of GPUs", "The best layout on each."), "div", {class: "pair"});
  const kinds = {fits: {...KINDS.fits, alpha: 1, size: 1},
    own: {name: "this plan", shape: SHAPES.ring, color: "var(--text)", size: 1.5}};
  for (const [key, label, limit] of [["tokens_per_second_per_gpu", "tokens/s per GPU"],
    ["peak_gib", "peak memory, GiB", {axis: "y", value: memory.usable_gib, text: `limit ${number(memory.usable_gib, 1)} GiB`}]]) {
    const at = p => ({x: p.world, y: p[key], tip: `${plural(p.world, "GPU")}: ${number(p.tokens_per_second_per_gpu)} tokens/s per GPU, ` +
      `${number(p.peak_gib, 1)} GiB, ${significant(p.days)} days`});
    points(element(made, "div"), {
      x: {label: "GPUs", log: true, ticks: worlds, format: n => number(n)}, y: {label, zero: true}, limit, line: true, kinds, height: 260,
      points: [...sizes.map(p => ({...at(p), kind: "fits", key: p.world})),
        ...sizes.filter(p => p.world === data.world).map(p => ({...at(p), kind: "own"}))],
      label: `${label} on other numbers of GPUs; arrow keys step through them`,
    });
  }
}

// Squares are GPUs in frames that are nodes. Ranks count along the axes, the last fastest.
function mesh() {
  const most = 4096, shown = Math.min(data.world, most), per = data.gpus_per_node;
  const made = section("The mesh", "Squares are GPUs and frames are nodes. Color is the pipeline rank, shade the place along tp and cp." +
    (data.world > most ? ` These are the first ${number(most)} ranks.` : ""));
  const axes = ["pp", "dp_replicate", "dp_shard", "cp", "tp"].map(axis => [axis, data.layout[axis]]);
  const inner = axes.map((_, i) => axes.slice(i + 1).reduce((a, [, n]) => a * n, 1));
  const box = element(made, "div", {class: "mesh", role: "group", "aria-label": "Ranks and their places", "data-explore": ""});
  for (let first = 0; first < shown; first += per) {
    const node = element(box, "div");
    for (let rank = first; rank < Math.min(first + per, shown); rank++) {
      const place = axes.map(([, n], i) => Math.floor(rank / inner[i]) % n);
      const depth = (place[3] * data.layout.tp + place[4]) / (data.layout.cp * data.layout.tp);
      element(node, "i", {"data-tip": `rank ${rank}: ` + axes.map(([axis], i) => `${axis} ${place[i]}`).join(", "),
        style: `background: ${color(place[0])}; opacity: ${1 - .7 * depth}`});
    }
  }
}
