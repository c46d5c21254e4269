// Keeps a page that `torchtitan watch` writes up to date: reads its own file again in a hidden frame, which passes its data on.
// A frame can do that from file://, too, where a page may fetch nothing.

const LATE = 3;  // intervals without a new page, after which it is called old
const live = {frame: null, clock: null, problem: null};

const isFrame = window !== parent && location.search !== "";
const passOn = () => parent.postMessage(data, location.protocol === "file:" ? "*" : location.origin);

function follow() {
  const line = element(main, "p", {class: "live dim"});
  main.querySelector("h1").after(line);
  live.clock = element(line, "span");
  live.problem = element(line, "span", {role: "status"});  // without the clock, or it would be read aloud all the time
  addEventListener("message", event => {
    if (event.source !== live.frame?.contentWindow || !event.data.report) return;
    live.frame.remove();
    live.frame = null;
    Object.assign(data, event.data);
    report = data.report;
    prepare();
    refresh();
    tellAge();
  });
  tellAge();
  setTimeout(again, 1000 * data.every);
}
function again() {
  if (data.every === null) return;
  if (!document.hidden) {
    live.frame?.remove();
    live.frame = element(document.body, "iframe", {hidden: "", src: `${location.pathname}?${Date.now()}`});  // another address, or a browser refuses to nest it
  }
  tellAge();
  setTimeout(again, 1000 * data.every);
}
function tellAge() {
  const late = Date.now() / 1000 - data.written > LATE * Math.max(data.every, 10);
  live.clock.textContent = `As of ${show.date(data.written).slice(11)}`;
  live.problem.textContent = data.every === null ? ": `torchtitan watch` has ended." : late ? ": nothing new since; is `torchtitan watch` still running?" : "";
}
