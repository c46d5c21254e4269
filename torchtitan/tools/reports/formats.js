// Numbers as people read them, as torchtitan/utils/wording.py prints them.

const pad = n => String(n).padStart(2, "0");
const fixed = (x, digits) => number(Number(x.toFixed(digits)), digits);  // rounds as Python does
function rounded(x) {  // four digits of what has no format of its own
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size < 1e-3 || size >= 1e7 ? x.toExponential(2) : x.toLocaleString("en", {maximumSignificantDigits: 4});
}
const show = {
  tokens(n) {
    let unit = "";
    for (const next of "KMBT") if (Math.abs(n) >= 999.5) { n /= 1000; unit = next; }
    const size = Math.abs(n);
    return fixed(n, !unit ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0) + unit;
  },
  loss: x => x.toFixed(4),
  percent: x => `${fixed(x, 1)}%`,
  gib: x => `${fixed(x, Math.abs(x) >= .995 ? 1 : 2)} GiB`,
  rate: x => fixed(x, Math.abs(x) >= 99.95 ? 0 : 1),
  duration(s) {
    if (!Number.isFinite(s)) return "unknown";
    if (s < 0) return `-${show.duration(-s)}`;
    if (s < 9.95) return s >= .995 ? `${s.toFixed(1)} s` : `${Number(s.toPrecision(2))} s`;
    if (s < 59.5) return `${s.toFixed(0)} s`;
    if (s < 3599.5) return `${Math.floor(Math.round(s) / 60)} min ${pad(Math.round(s) % 60)} s`;
    const minutes = Math.round(s / 60), hours = Math.round(s / 3600);
    if (s < 24 * 3600 - 30) return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
    return `${number(Math.floor(hours / 24))} d ${pad(hours % 24)} h`;
  },
  date(s) {
    const at = new Date(1000 * s);
    return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  },
  layout: layout => Object.entries(layout).map(([axis, n]) => `${axis} ${n}`).join(" x ") || "one rank",
};
const or = (value, format, otherwise = "–") => value === null || value === undefined ? otherwise : format(value);
