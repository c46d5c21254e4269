// Charts of curves over a common axis: their cursors move together, and zooming into one zooms all.

const AXES = {
  step: {name: "steps", label: "step", format: x => number(Math.round(x))},
  tokens: {name: "tokens", label: "tokens", format: show.tokens},
  hours: {name: "time", label: "hours since the first start", format: x => show.duration(3600 * x)},
  flops: {name: "FLOPs", label: "FLOPs of the model", format: x => x === 0 ? "0" : x.toExponential(2)},
};
const ticks = {step: x => x >= 1e5 ? show.tokens(x) : number(x), tokens: show.tokens, hours: rounded, flops: x => x === 0 ? "0" : x.toExponential(1)};
const view = {x: "step", smooth: 50, log: false, clip: false, zoom: null, hidden: new Set()};
const charts = [];
const listeners = {zoom: []};  // called after a zoom

// ---- places on the axis

// The index of the last of the ascending `xs` that is at most x; -1 if all are beyond it.
function indexOf(xs, x) {
  let low = -1, high = xs.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return low;
}
function interpolate(xs, ys, x) {
  if (!xs.length) return null;
  const i = indexOf(xs, x);
  if (i < 0) return xs[0] > 0 ? ys[0] * x / xs[0] : ys[0];
  if (i === xs.length - 1) return ys[i];
  return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i] || 1);
}
const nearest = (xs, x) => {
  const i = indexOf(xs, x);
  return i < 0 ? 0 : i + 1 < xs.length && xs[i + 1] - x < x - xs[i] ? i + 1 : i;
};

const place = (run, step) => view.x === "step" ? step : interpolate(run.axes.step, run.axes[view.x] || [], step);
const known = axis => report.runs.every(run => run.axes[axis]);

// An exponential average over about `span` steps, however far apart they are; the weights of its terms sum to one.
function smooth(steps, values, span) {
  let sum = 0, norm = 0, last = steps[0];
  return values.map((value, i) => {
    if (value === null) return null;
    const decay = Math.exp(-(steps[i] - last) / span);
    last = steps[i];
    sum = decay * sum + value;
    norm = decay * norm + 1;
    return sum / norm;
  });
}
const lastStep = () => Math.max(1, ...report.runs.map(run => run.axes.step.at(-1) || 0));
const span = () => view.smooth ? lastStep() * 10 ** (-3.3 + 2.6 * view.smooth / 100) : 0;

// ---- zoom

function whole() {
  const ends = visible().map(run => run.axes[view.x]).filter(xs => xs && xs.length).map(xs => [xs[0], xs.at(-1)]);
  if (!ends.length) return [0, 1];
  const low = Math.min(...ends.map(([a]) => a)), high = Math.max(...ends.map(([, b]) => b));
  return low < high ? [low, high] : [low - .5, high + .5];
}
function zoomTo(range) {
  const [low, high] = whole();
  view.zoom = range && range[1] > range[0] ? [Math.max(range[0], low), Math.min(range[1], high)] : null;
  if (view.zoom && (view.zoom[1] <= view.zoom[0] || (view.zoom[0] === low && view.zoom[1] === high))) view.zoom = null;
  charts.forEach(chart => chart.update());
  listeners.zoom.forEach(listen => listen());
}
function zoomBy(factor, center) {
  const [low, high] = view.zoom || whole();
  zoomTo([center - (center - low) * factor, center + (high - center) * factor]);
}

// ---- a chart

// `curves()` returns what to draw: [{name, run, color, dash, steps, xs, ys, mean}], xs ascending, null in ys for gaps;
// `mean` asks for a smoothed curve as well, `errors` are standard errors of ys. `marks()`: [{x, text, color}], upright lines. `zero`: the axis includes it.
function curveChart(parent, {title, label, format, tick, curves, marks = () => [], zero, log, dots, height = 210, key}) {
  const box = element(parent, "div", {class: "panel", "data-chart": key});
  element(box, "h3", {}, title);
  const holder = element(box, "div"), none = element(box, "p", {class: "dim", hidden: ""}, "Nothing recorded yet.");
  const chart = {key, box, update, at: null};
  let drawn, shown = [], lines = [], kind = "";

  const isFew = curve => curve.xs.length < (dots ? 300 : 40);  // drawn with a dot for each value
  const positive = () => log && view.log;
  function bounds(low, high) {  // of what is in view
    for (const {ys, errors} of shown) if (errors) ys.forEach((y, i) => {
      if (y !== null && y >= low && y <= high) { low = Math.min(low, y - errors[i]); high = Math.max(high, y + errors[i]); }
    });
    if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return positive() ? [1, 10] : [0, 1];
    if (view.clip) [low, high] = middle(low, high);
    if (positive()) return [low / 1.06, high * 1.06];
    const room = (high - low || Math.abs(high) || 1) * .06;
    return [zero && low >= 0 ? 0 : low - room, high + room];
  }
  function middle(low, high) {
    const [from, to] = view.zoom || whole(), all = [];
    for (const {xs, ys} of shown) xs.forEach((x, i) => { if (x >= from && x <= to && ys[i] !== null && (!positive() || ys[i] > 0)) all.push(ys[i]); });
    if (all.length < 20) return [low, high];
    all.sort((a, b) => a - b);
    return [all[Math.floor(.01 * all.length)], all[Math.ceil(.99 * (all.length - 1))]];
  }
  function columns() {
    const usable = values => positive() ? values.map(y => y !== null && y > 0 ? y : null) : values;
    const tables = shown.map(curve => [curve.xs, usable(curve.ys), ...(curve.smoothed ? [usable(curve.smoothed)] : [])]);
    return tables.length === 1 || tables.every(([xs]) => xs === tables[0][0])
      ? [tables[0][0], ...tables.flatMap(([, ...rest]) => rest)] : uPlot.join(tables);
  }
  function series() {
    return shown.flatMap(curve => {
      const own = {spanGaps: true, dash: curve.dash, stroke: () => resolved(curve.color)};
      const few = isFew(curve);
      const raw = {...own, width: curve.smoothed ? 1 : 1.6, alpha: curve.smoothed ? .35 : 1,
        points: {show: few, size: 5, fill: () => resolved(curve.color)}};
      return curve.smoothed ? [raw, {...own, width: 2, points: {show: false}}] : [raw];
    });
  }
  function update() {
    const width = span();
    shown = curves().filter(curve => curve.xs.length && curve.ys.some(y => y !== null));
    for (const curve of shown) curve.smoothed = width && curve.mean ? smooth(curve.steps, curve.ys, width) : null;
    lines = marks();
    none.hidden = shown.length > 0;
    holder.hidden = !shown.length;
    if (!shown.length) { if (drawn) remove(); return; }
    const now = JSON.stringify([view.x, positive(), shown.map(c => [c.name, c.run, c.color, Boolean(c.smoothed), c.xs.length < 60])]);
    const [low, high] = view.zoom || whole();
    if (drawn && now === kind) drawn.batch(() => { drawn.setData(columns(), false); drawn.setScale("x", {min: low, max: high}); });
    else { if (drawn) remove(); kind = now; make(low, high); }
  }
  function remove() {
    drawn.destroy();
    holder.replaceChildren();
    drawn = undefined;
  }
  function make(low, high) {
    const axis = AXES[view.x];
    drawn = plot(holder, {
      x: {label: axis.label, format: ticks[view.x]}, y: {label, format: tick || format, log: positive(), range: bounds}, data: columns(), series: series(), height,
      label: `${title}: ${shown.map(curve => curve.name).join(", ")}. Arrow keys move along the curves, plus and minus zoom, Escape shows all.`,
      hooks: {draw: [drawErrors, drawMarks], setCursor: [moved], setSelect: [selected]},
      cursor: {x: true, y: false, drag: {x: true, y: false, setScale: false}, sync: {key: "runs", scales: ["x", null], filters: {pub: type => type === "mousemove"}},
        bind: {dblclick: () => () => { zoomTo(null); return null; }}},
    });
    chart.plot = drawn;
    drawn.setScale("x", {min: low, max: high});
    drawn.over.addEventListener("mouseenter", () => { chart.over = true; });
    drawn.over.addEventListener("mouseleave", () => { chart.over = false; hideTip(); });
    drawn.root.parentNode.addEventListener("keydown", keys);
    drawn.root.parentNode.addEventListener("blur", () => { hideTip(); chart.at = null; drawn.setCursor({left: -10, top: -10}); });
  }
  function selected(u) {
    const {left, width} = u.select;
    if (width < 3) return;
    u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
    zoomTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }
  function moved(u) {
    if (!chart.over || u.cursor.left < 0) return;
    tell(u.posToVal(u.cursor.left, "x"));
  }
  function tell(x) {
    const frame = drawn.over.getBoundingClientRect(), left = drawn.valToPos(x, "x");
    showTip(words(x), frame.left + left, frame.top + 8);
  }
  function words(x) {
    const [low, high] = view.zoom || whole(), text = [];
    const near = lines.filter(mark => Math.abs(mark.x - x) < (high - low) * .008).map(mark => mark.text);
    for (const curve of shown) {
      const i = nearest(curve.xs, x), raw = curve.ys[i], mean = curve.smoothed && curve.smoothed[i];
      if (x > curve.xs.at(-1) + (high - low) * .02 || raw === null) continue;
      if (!text.length) text.push(`step ${number(curve.steps[i])}${view.x === "step" ? "" : `, ${AXES[view.x].format(curve.xs[i])}`}`);
      const name = shown.length > 1 || mean ? `${curve.name}: ` : "";
      const error = curve.errors && curve.errors[i] ? ` ± ${format(curve.errors[i])}` : "";
      text.push(name + (mean ? `${format(mean)} smoothed, ${format(raw)}` : format(raw) + error));
    }
    return [...text, ...near].join("\n");
  }
  function keys(event) {
    const xs = shown[0].xs, [low, high] = view.zoom || whole();
    const inside = [indexOf(xs, low - 1e-9 * Math.abs(low) - 1e-12) + 1, indexOf(xs, high)];
    const stride = Math.max(1, Math.round((inside[1] - inside[0]) / 100)) ;
    const i = chart.at === null ? null : nearest(xs, chart.at);
    const next = {
      ArrowRight: i === null ? inside[0] : i + (event.shiftKey ? 1 : stride), ArrowLeft: i === null ? inside[1] : i - (event.shiftKey ? 1 : stride),
      Home: inside[0], End: inside[1],
    }[event.key];
    if (next !== undefined) {
      event.preventDefault();
      chart.at = xs[Math.max(inside[0], Math.min(inside[1], next))];
      drawn.setCursor({left: drawn.valToPos(chart.at, "x"), top: 10});
      tell(chart.at);
    } else if (event.key === "Escape") { hideTip(); chart.at = null; zoomTo(null); }
    else if (event.key === "+" || event.key === "=" || event.key === "-") {
      zoomBy(event.key === "-" ? 2 : .5, chart.at === null ? (low + high) / 2 : chart.at);
    } else return;
    event.preventDefault();
  }
  function drawErrors(u) {  // a standard error up and down from each value
    const {ctx, bbox} = u, ratio = devicePixelRatio, cap = 3 * ratio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = 1.2 * ratio;
    ctx.globalAlpha = .6;
    for (const {xs, ys, errors, color} of shown) {
      if (!errors) continue;
      ctx.strokeStyle = resolved(color);
      ctx.beginPath();
      xs.forEach((x, i) => {
        if (!errors[i] || x === null) return;
        const at = u.valToPos(x, "x", true), [low, high] = [-1, 1].map(sign => u.valToPos(ys[i] + sign * errors[i], "y", true));
        for (const end of [low, high]) { ctx.moveTo(at - cap, end); ctx.lineTo(at + cap, end); }
        ctx.moveTo(at, low);
        ctx.lineTo(at, high);
      });
      ctx.stroke();
    }
    ctx.restore();
  }
  function drawMarks(u) {
    const {ctx, bbox} = u, ratio = devicePixelRatio;
    ctx.save();
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    for (const mark of lines) {
      const left = u.valToPos(mark.x, "x", true);
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.strokeStyle = resolved(mark.color);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
  charts.push(chart);
  return chart;
}
