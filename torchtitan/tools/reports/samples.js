// What the models wrote: a prompt, a step, and each run's text at that step or the last one before.

const ENDS_OF_TEXT = {eos: "ended by the model", length: "cut at the longest length", context: "cut at the end of the context"};
const SAMPLE_ROWS = 300, PROMPT_LENGTH = 90;
const chosen = {prompt: null, step: null};  // a step of null is the last one

const written = run => run.samples.find(one => one.prompt === chosen.prompt);
const shortened = text => text.length > PROMPT_LENGTH ? `${text.slice(0, PROMPT_LENGTH)}…` : text;

function redrawSamples() {
  const runs = visible(), state = runs.map(run => [run.path, run.color, run.samples.map(one => [one.prompt, one.step, one.text.at(-1)])]);
  redraw(parts.samples, state, box => samples(box, runs.filter(run => run.samples.length)));
}

function samples(box, runs) {
  const prompts = [...new Set(runs.flatMap(run => run.samples.map(one => one.prompt)))];
  if (!prompts.length) return;
  if (!prompts.includes(chosen.prompt)) chosen.prompt = prompts[0];
  element(box, "h2", {}, "What the model wrote");
  const bar = element(box, "div", {class: "choose"});
  const holder = element(box, "div", {class: "texts"}), more = element(box, "details"), list = element(more, "div");
  more.prepend(element(more, "summary", {}, "All steps"));
  if (prompts.length > 1) {
    const label = element(bar, "label", {class: "prompt"}, "Prompt "), select = element(label, "select", {"data-control": "prompt"});
    prompts.forEach((prompt, i) => { element(select, "option", {value: i}, shortened(prompt) || "(empty)").selected = prompt === chosen.prompt; });
    select.addEventListener("change", () => { chosen.prompt = prompts[select.value]; steps(); });
  }
  const label = element(bar, "label", {class: "slider"}, "Step "), slider = element(label, "input", {type: "range", min: 0, step: 1, "data-control": "sample"});
  const said = element(label, "output");
  const [before, after] = [["‹", "Earlier", -1], ["›", "Later", 1]].map(([sign, name, by]) => {
    const button = element(bar, "button", {type: "button", "aria-label": `${name} step`}, sign);
    button.addEventListener("click", () => { slider.value = Number(slider.value) + by; slide(); });
    return button;
  });
  let all = [];
  function steps() {  // of the chosen prompt
    all = [...new Set(runs.flatMap(run => written(run)?.step || []))].sort((a, b) => a - b);
    slider.max = all.length - 1;
    slider.value = chosen.step === null ? all.length - 1 : Math.max(0, indexOf(all, chosen.step));
    show();
    if (more.open) rows();
  }
  function slide() {
    const last = Number(slider.value) === all.length - 1;
    chosen.step = last ? null : all[slider.value];
    show();
  }
  function show() {
    const at = Number(slider.value), step = all[at];
    said.textContent = number(step);
    slider.setAttribute("aria-valuetext", `step ${number(step)}`);
    before.disabled = at === 0;
    after.disabled = at === all.length - 1;
    holder.replaceChildren();
    for (const run of runs) {
      const own = written(run), i = own ? indexOf(own.step, step) : -1;
      if (!own) continue;
      const head = element(holder, "h3");
      if (report.runs.length > 1) { element(head, "i", {class: "swatch", style: `background: ${run.color}`}); head.append(`${run.name} `); }
      element(head, "span", {class: "dim"}, i < 0 ? "nothing yet" : [`step ${number(own.step[i])}`, ENDS_OF_TEXT[own.end[i]]].filter(Boolean).join(", "));
      if (i < 0) continue;
      const text = element(holder, "pre", {class: "sample", tabindex: 0, "data-sample": run.name});
      element(text, "span", {class: "dim"}, own.prompt);
      text.append(own.text[i]);
    }
  }
  function rows() {
    const found = runs.flatMap(run => written(run) ? written(run).step.map((step, i) => [run.name, step, written(run).text[i]]) : []).sort((a, b) => b[1] - a[1]);
    list.replaceChildren();
    if (found.length > SAMPLE_ROWS) element(list, "p", {class: "dim"}, `The last ${number(SAMPLE_ROWS)} of ${number(found.length)}.`);
    const several = report.runs.length > 1;
    table(list, [...(several ? [["run", "left"]] : []), ["step"], ["text", "left wrap text"]], found.slice(0, SAMPLE_ROWS).map(([run, step, text]) =>
      [...(several ? [run] : []), number(step), text]), {label: "What the model wrote, the last step first", wide: true});
  }
  slider.addEventListener("input", slide);
  more.addEventListener("toggle", () => { if (more.open) rows(); });
  steps();
}
