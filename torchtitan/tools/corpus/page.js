// The page of `torchtitan data`: all sources in a table, what a run reads of them, and each source in detail.

const DOCUMENTS = "var(--c2)", TOKENS = "var(--c0)";
const share = x => x === 0 ? "0%" : x < 1e-4 ? "< 0.01%" : `${(100 * x).toLocaleString("en", {maximumSignificantDigits: x < .1 ? 2 : 3})}%`;
const whole = x => x < 1e6 ? number(Math.round(x)) : show.tokens(x);
const amount = ({value, noise}) => noise ? `${show.tokens(value)} ± ${show.tokens(noise)}` : whole(value);
const perToken = one => one === null ? "–" : one.value.toFixed(3) + (one.noise ? ` ± ${one.noise.toFixed(3)}` : "");
const isPart = ({text}) => text.includes("\ufffd");
const quoted = entry => isPart(entry) ? `bytes, id ${entry.id}` : JSON.stringify(entry.text).replaceAll(" ", "·");
const FREQUENT = 12;

heading();
if (data.sources.length > 1) overview();
if (data.mixture) mixture();
data.sources.forEach(source);
document.querySelectorAll("[data-explore]").forEach(explore);

function heading() {
  const sources = data.sources.map(one => one.name);
  element(main, "h1", {}, sources.length > 3 ? plural(sources.length, "source") : sources.join(", "));
  element(main, "p", {class: "dim"}, `Tokenizer ${data.tokenizer.name}, ${number(data.tokenizer.entries)} entries`);
  if (data.sources.some(one => one.drawn)) element(main, "p", {class: "dim"},
    `About ${plural(data.sample, "document")} of each source were drawn at random (seed ${data.seed}); ± is half a 95% confidence interval.`);
}

function overview() {
  const box = section("Sources"), columns = [["source", "left"], ["documents"], ["tokens"], ["bytes"], ["bytes per token"], ["median length"], ["95%"], [`> ${number(data.seq_len)}`]];
  table(box, columns, data.sources.map(one => [[one.name, one.path === one.name ? "" : one.path], amount(one.documents), amount(one.tokens), amount(one.bytes), perToken(one.bytes_per_token),
    or(one.lengths["50"], whole), or(one.lengths["95"], whole), share(one.longer.documents)]), {label: "All sources"});
}

function mixture() {
  const box = section("What training reads", `In ${plural(data.steps, "step")}.`), read = data.mixture;
  if (read.length > 1) {
    const colors = {tokens: DOCUMENTS};
    bars(box, read.map(one => ({label: one.name, parts: [["tokens", one.share]], values: [share(one.share)]})), share, {colors, label: "Share of each source in the tokens"});
  }
  table(box, [["source", "left"], ["rows"], ["tokens"], ["share"], ["epochs"]], read.map(one =>
    [one.name, number(one.rows), show.tokens(one.tokens), share(one.share), or(one.epochs, x => x.toLocaleString("en", {maximumSignificantDigits: 3}), "unknown")]), {label: "What training reads of each source"});
}

function source(one) {
  const box = section(one.name, [one.path === one.name ? "" : one.path, one.kind].filter(Boolean).join(", ")), use = one.vocabulary;
  box.dataset.source = one.name;
  if (!Object.keys(one.lengths).length) { problems(box, one); element(box, "p", {}, "No documents."); return; }
  const cards = element(box, "div", {class: "cards"});
  const card = (key, value, name, more) => {
    const made = element(cards, "div");
    element(made, "b", {"data-figure": key}, value);
    element(made, "span", {}, name);
    if (more) element(made, "span", {class: "dim"}, more);
  };
  const spread = one.of_documents;
  card("documents", amount(one.documents), "documents", one.drawn ? `${number(one.read.documents)} read` : "");
  card("tokens", amount(one.tokens), "tokens", `${amount(one.bytes)} bytes of text`);
  card("bytes_per_token", perToken(one.bytes_per_token), "bytes per token", `${spread["5"].toFixed(2)} to ${spread["95"].toFixed(2)} in 90% of the documents`);
  card("longer", share(one.longer.documents), `longer than ${number(data.seq_len)} tokens`, `with ${share(one.longer.tokens)} of the tokens`);
  card("seen", share(use.seen / use.entries), "of the vocabulary occurs", `${number(use.seen)} of ${number(use.entries)} entries`);
  card("parts", share(use.parts.tokens), "tokens that are no whole character", `for ${share(use.parts.bytes)} of the bytes`);
  if (use.unknown) card("unknown", share(use.unknown), "tokens of unknown text", "the vocabulary can't encode it");
  if (one.duplicates) card("duplicates", number(one.duplicates.documents), "exact duplicates", bytes(one.duplicates.bytes));
  problems(box, one);
  lengths(box, one);
  vocabulary(box, one);
}

function problems(box, {bad, first_bad}) {
  const kinds = Object.entries(bad);
  if (!kinds.length) return;
  element(box, "p", {class: "bad"}, `Bad documents: ${kinds.map(([kind, count]) => `${number(count)} ${kind}`).join(", ")}`);
  if (first_bad) element(box, "p", {class: "dim"}, `The first is ${first_bad}`);
}

function lengths(box, one) {
  element(box, "h3", {}, "Lengths of documents, in tokens");
  const parts = bin => [["documents", bin.documents]], colors = {documents: DOCUMENTS};
  bars(box, one.histogram.map(bin => ({label: `${number(bin.from)} – ${number(bin.to)}`, parts: parts(bin), values: [share(bin.documents), share(bin.tokens)]})), share, {colors, label: "Documents by length"});
  element(box, "p", {class: "dim"}, "At the right: share of the documents, and of all tokens.");
  const points = ["1", "5", "25", "50", "75", "95", "99"], row = (name, values, format) => [name, ...points.map(p => format(values[p])), format(values.mean), format(values.max)];
  table(box, [["", "left"], ...points.map(p => [`${p}%`]), ["mean"], ["largest"]], [row("tokens", one.lengths, whole), row("bytes per token", one.of_documents, x => x.toFixed(2))],
    {label: "Percentiles over documents"});
}

function vocabulary(box, {vocabulary: use, drawn}) {
  element(box, "h3", {}, "Vocabulary");
  element(box, "p", {}, `${Object.entries(use.covering).map(([part, n]) => `${plural(n, "entr").replace(/entrs?$/, n === 1 ? "entry" : "entries")} make ${part}`).join(", ")} of the tokens.`);
  bars(box, use.frequent.slice(0, FREQUENT).map(entry => ({label: quoted(entry), parts: [["tokens", entry.share]], values: [share(entry.share)]})), share, {colors: {tokens: TOKENS}, label: "The most frequent entries"});
  if (!use.unseen.length) return;
  const details = element(box, "details");
  element(details, "summary", {}, `${number(use.entries - use.seen)} entries ${drawn ? "are not in what was read" : "never occur"}`);
  const list = element(details, "pre", {class: "words"});
  use.unseen.forEach(entry => { element(list, "span", {}, quoted(entry)); list.append(" "); });
  if (use.entries - use.seen > use.unseen.length) list.append("…");
}
