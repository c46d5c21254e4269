// What pages share: elements, numbers, tables, stacked bars, and tooltips that mouse, touch and keyboard reach.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const SVG = ["svg", "rect", "text", "line", "path", "circle", "title", "g"];

function element(parent, name, attributes = {}, text) {
  const made = SVG.includes(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// ---- numbers

const number = (x, digits = 0) => x.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const significant = x => x >= 1000 ? number(x) : x.toLocaleString("en", {minimumSignificantDigits: 3, maximumSignificantDigits: 3});
const percent = (x, digits = 0) => number(100 * x, digits) + " %";
const plural = (n, noun, ending = "s") => `${number(n)} ${noun}${n === 1 ? "" : ending}`;
const scaled = (x, unit, steps) => {
  const [factor, prefix] = steps.find(([least]) => x >= least) || [1, ""];
  return `${(x / factor).toLocaleString("en", {maximumSignificantDigits: 4})} ${prefix}${unit}`;
};
const bytes = x => scaled(x, "B", [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]);
const large = (x, noun) => scaled(x, noun, [[1e12, "trillion "], [1e9, "billion "], [1e6, "million "]]);
const seconds = s => s >= .1 ? `${significant(s)} s` : `${significant(1000 * s)} ms`;
const duration = hours => hours < 1 / 60 ? seconds(3600 * hours) : hours >= 48 ? `${number(hours / 24, 1)} days` : hours >= 1 ? `${number(hours, 1)} hours` :
  `${significant(60 * hours)} minutes`;

// ---- sections and tables

function section(title, note) {
  const made = element(main, "section");
  element(made, "h2", {}, title);
  if (note) element(made, "p", {class: "dim"}, note);
  return made;
}

// `columns` of [heading, class]; a row is a list of texts, or of [text, what stands below it in small]. Rows with a key can be focused and highlighted.
function table(parent, columns, rows, {key, label, wide} = {}) {
  const box = element(parent, "div", {class: "scroll", tabindex: 0, role: "region", "aria-label": label});
  const made = element(box, "table", wide ? {class: "wide"} : {}), head = element(element(made, "thead"), "tr"), body = element(made, "tbody");
  for (const [text, kind] of columns) element(head, "th", {scope: "col", class: kind}, text);
  rows.forEach((row, i) => {
    const line = element(body, "tr", key ? {"data-key": key(i), tabindex: 0} : {});
    row.forEach((cell, j) => {
      const [text, below] = [cell].flat(), made = element(line, "td", {class: columns[j][1]}, text);
      if (below) element(made, "small", {}, below);
    });
  });
  return made;
}

// A legend of [name, color], or of [name, color, shape, edge] as in a chart.
function legend(parent, entries) {
  const made = element(parent, "div", {class: "key"});
  for (const [name, color, shape, edge] of entries) {
    const entry = element(made, "span");
    if (shape) {
      element(element(entry, "svg", {viewBox: "-8 -8 16 16", "aria-hidden": "true"}), "path",
        {d: shape.d, fill: shape.filled ? color : "none", stroke: edge || color, "stroke-width": edge ? 1.2 : 2});
    } else element(entry, "i", {style: `background: ${color}`});
    entry.append(name);
  }
}

// ---- stacked bars

const color = i => `var(--c${i % 10})`;

// A row is {label, parts: [[name, value]], values: texts at its right}, all to one scale. `colors`: name to CSS color. `limit` is marked.
function bars(parent, rows, format, {colors, limit, label}) {
  const most = Math.max(limit || 0, ...rows.map(row => row.parts.reduce((sum, [, value]) => sum + value, 0))) || 1;
  const made = element(parent, "div", {class: "bars", role: "group", "aria-label": label, "data-explore": "",
    style: `--values: ${rows[0].values.length}`});
  for (const row of rows) {
    element(made, "span", {}, row.label);
    const track = element(made, "div", {class: "track"});
    for (const [name, value] of row.parts) {
      if (value <= 0) continue;
      const tip = `${row.parts.length > 1 ? `${row.label}, ` : ""}${name}: ${format(value)}`;
      element(track, "i", {"data-tip": tip, style: `width: ${100 * value / most}%; background: ${colors[name]}`});
    }
    if (limit) element(track, "span", {class: "limit", style: `left: ${100 * limit / most}%`});
    for (const value of row.values) element(made, "span", {class: "value"}, value);
  }
  return made;
}

// ---- tooltips: of whatever has data-tip, when the mouse is over it or it has the focus

const tip = element(document.body, "div", {id: "tip", role: "tooltip", hidden: ""});
tip.setAttribute("aria-live", "polite");

function showTip(text, x, y) {  // x, y in the viewport: the point to which the tip belongs
  tip.textContent = text;
  tip.hidden = false;
  const width = tip.offsetWidth, height = tip.offsetHeight, edge = document.documentElement.clientWidth;
  tip.style.left = `${Math.max(4, Math.min(x - width / 2, edge - width - 4)) + scrollX}px`;
  tip.style.top = `${(y - height - 10 > 0 ? y - height - 10 : y + 16) + scrollY}px`;
}
const hideTip = () => { tip.hidden = true; };
function tipOf(target) {
  const box = target.getBoundingClientRect();
  showTip(target.dataset.tip, box.left + box.width / 2, box.top);
}
for (const event of ["pointerover", "focusin"]) document.addEventListener(event, e => {
  const target = e.target.closest("[data-tip]");
  if (target) tipOf(target); else if (!e.target.closest(".chart")) hideTip();
});
document.addEventListener("keydown", e => { if (e.key === "Escape") hideTip(); });

// A [data-explore] group is one stop of the Tab key; the arrows move among what has a tip in it, along rows and between.
function explore(group) {
  const first = group.querySelector("[data-tip]");
  if (first) first.setAttribute("tabindex", 0);
}
document.addEventListener("keydown", e => {
  const group = e.target.closest?.("[data-explore]"), step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1}[e.key];
  if (!group || !step || !e.target.dataset.tip) return;
  const all = [...group.querySelectorAll("[data-tip]")];
  let next = all[all.indexOf(e.target) + step];
  if (e.key === "ArrowDown" || e.key === "ArrowUp") {
    const middle = box => box.left + box.width / 2, own = e.target.getBoundingClientRect();
    const boxes = all.map(other => [other, other.getBoundingClientRect()]).filter(([, box]) => (box.top - own.top) * step > 1);
    const near = ([, box]) => Math.abs(box.top - own.top) * 1e4 + Math.abs(middle(box) - middle(own));
    next = boxes.length ? boxes.reduce((a, b) => near(b) < near(a) ? b : a)[0] : undefined;
  }
  e.preventDefault();
  if (!next) return;
  e.target.setAttribute("tabindex", -1);
  next.setAttribute("tabindex", 0);
  next.focus();
  tipOf(next);
});
