// Charts with two axes, drawn by uPlot: drag to zoom, double click for the whole.

const SHAPES = {
  dot: {d: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0", filled: true},
  ring: {d: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0"},
  cross: {d: "M-5-5L5 5M-5 5L5-5"},
  diamond: {d: "M0-6L6 0L0 6L-6 0Z", filled: true},
};
const probe = element(document.body, "span", {hidden: ""});
function resolved(color) {  // what a canvas understands, in the scheme that is on
  probe.style.color = color;
  return getComputedStyle(probe).color;
}

// One uPlot as wide as `parent`. An axis is {label, log, ticks, format, range(min, max)}.
function plot(parent, {x, y, data, series, height = 300, label, hooks = {}, cursor = {}}) {
  const box = element(parent, "div", {class: "chart", tabindex: 0, role: "group", "aria-label": label});
  const font = "12px system-ui, sans-serif", format = value => value.toLocaleString("en", {maximumSignificantDigits: 4});
  const axis = ({label, ticks, format: own}, size) => ({
    label, font, labelFont: font, labelSize: 22, labelGap: 2, size, stroke: () => resolved("var(--dim)"),
    grid: {stroke: () => resolved("var(--line)"), width: 1}, ticks: {stroke: () => resolved("var(--line)"), width: 1, size: 5},
    ...(ticks ? {splits: () => ticks, filter: (u, splits) => splits} : {}), values: (u, splits) => splits.map(own || format),
  });
  const scale = ({log, range}) => ({time: false, ...(log ? {distr: 3, log: 2} : {}), ...(range ? {range: (u, a, b) => range(a, b)} : {})});
  const made = new uPlot({
    width: box.clientWidth, height, series: [{}, ...series], legend: {show: false}, hooks,
    cursor: {points: {show: false}, x: false, y: false, drag: {x: true, y: true, uni: 20}, ...cursor},
    scales: {x: scale(x), y: scale(y)}, axes: [axis(x, 34), axis(y, 58)],
  }, data, box);
  box.plot = made;  // for whoever has the box
  new ResizeObserver(() => made.setSize({width: box.clientWidth, height})).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => made.redraw(false));
  return made;
}

// Points {x, y, kind, tip, key}. `kinds`: name to {shape, color, size, alpha, name}, drawn in this order.
// `limit`: {axis, value, text}, a line. Those with a key are what the arrow keys step through (if there are none, all).
// `onselect` gets the key of the point under the mouse or chosen by the keyboard, or undefined.
function points(parent, {x, y, points, kinds, limit, line, label, height, onselect = () => {}}) {
  const sorted = [...points].sort((a, b) => a.x - b.x);
  const stops = sorted.some(p => p.key !== undefined) ? sorted.filter(p => p.key !== undefined) : sorted;
  const values = axis => [...sorted.map(p => p[axis]), ...(limit && limit.axis === axis ? [limit.value] : [])];
  const whole = axis => ({
    ...axis.spec, range(min, max) {
      const all = values(axis.name), low = Math.min(...all), high = Math.max(...all), own = sorted.map(p => p[axis.name]);
      if (min !== null && (min !== Math.min(...own) || max !== Math.max(...own))) return [min, max];  // zoomed
      if (axis.spec.log) return [low / 1.25, high * 1.25];
      const room = (high - low || high || 1) * .06;
      return [axis.spec.zero ? 0 : Math.max(0, low - room), high + (axis.spec.zero ? high * .1 : room)];
    },
  });
  let current, mark;
  const place = (u, p, canvas) => [u.valToPos(p.x, "x", canvas), u.valToPos(p.y, "y", canvas)];
  function draw(u) {
    const {ctx, bbox} = u, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const [name, kind] of Object.entries(kinds)) {
      const path = new Path2D(kind.shape.d), size = ratio * (kind.size || 1);
      ctx.fillStyle = ctx.strokeStyle = resolved(kind.color);
      ctx.globalAlpha = kind.alpha || 1;
      for (const p of sorted) if (p.kind === name) {
        const [left, top] = place(u, p, true);
        ctx.setTransform(size, 0, 0, size, left, top);
        ctx.lineWidth = (kind.edge ? 1.2 : 2) / (kind.size || 1);
        if (kind.shape.filled) ctx.fill(path);
        if (kind.edge) ctx.strokeStyle = resolved(kind.edge);
        if (kind.edge || !kind.shape.filled) ctx.stroke(path);
      }
    }
    ctx.restore();
    if (limit) drawLimit(u, ratio);
  }
  function drawLimit(u, ratio) {
    const {ctx, bbox} = u, upright = limit.axis === "x", at = u.valToPos(limit.value, limit.axis, true);
    const [from, span] = upright ? [bbox.left, bbox.width] : [bbox.top, bbox.height];
    if (at < from || at > from + span) return;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = resolved("var(--bad)");
    ctx.lineWidth = 2 * ratio;
    ctx.setLineDash([6 * ratio, 4 * ratio]);
    ctx.beginPath();
    if (upright) { ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); }
    else { ctx.moveTo(bbox.left, at); ctx.lineTo(bbox.left + bbox.width, at); }
    ctx.stroke();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    const width = ctx.measureText(limit.text).width, gap = 6 * ratio;
    const beside = at + gap + width > bbox.left + bbox.width ? at - gap - width : at + gap;
    if (upright) ctx.fillText(limit.text, beside, bbox.top + bbox.height - gap);
    else ctx.fillText(limit.text, bbox.left + bbox.width - gap - width, at - gap);
    ctx.restore();
  }
  const xs = sorted.map(p => p.x), ys = sorted.map(p => p.y);
  const drawn = plot(parent, {
    x: whole({name: "x", spec: x}), y: whole({name: "y", spec: y}), data: [xs, ys], label, height,
    series: [{points: {show: false}, width: 1.5, stroke: () => resolved("var(--c9)"), ...(line ? {} : {paths: () => null})}],
    hooks: {draw: [draw], setSize: [() => select()], setScale: [() => select()]},
  });
  const over = drawn.over, box = drawn.root.parentNode;
  mark = element(over, "i", {class: "mark", hidden: ""});
  function select(point) {
    if (!mark || (point === undefined && current === undefined)) return;
    current = point;
    mark.hidden = !point;
    if (!point) hideTip(); else {
      const [left, top] = place(drawn, point), frame = over.getBoundingClientRect();
      mark.style.left = `${left}px`;
      mark.style.top = `${top}px`;
      showTip(point.tip, frame.left + left, frame.top + top - 4);
    }
    onselect(point && point.key);
  }
  over.addEventListener("mousemove", e => {
    const near = p => { const [a, b] = place(drawn, p); return Math.hypot(a - e.offsetX, b - e.offsetY) - (p.key !== undefined ? 6 : 0); };
    let best, least = 14;
    for (const p of sorted) { const far = near(p); if (far < least) { least = far; best = p; } }
    select(best);
  });
  over.addEventListener("mouseleave", () => select());
  box.addEventListener("blur", () => select());
  box.addEventListener("keydown", e => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[e.key];
    if (e.key === "Escape") select();
    if (!step) return;
    e.preventDefault();
    const index = stops.indexOf(current);
    select(stops[index < 0 ? (step > 0 ? 0 : stops.length - 1) : Math.max(0, Math.min(stops.length - 1, index + step))]);
  });
  legend(parent, Object.entries(kinds).filter(([name]) => sorted.some(p => p.kind === name))
    .map(([, kind]) => [kind.name, kind.color, kind.shape, kind.edge]));
  return {select: key => select(key === undefined ? undefined : stops.find(p => p.key === key))};
}
