// Runs the script of a report in node, in a page that is only as real as the script needs, and prints what became of it.
// node report_dom.js PAGE.html (button|filter|chart): what asks for interactive charts
"use strict";
const html = require("fs").readFileSync(process.argv[2], "utf8");
const inside = (id) => html.match(new RegExp(`<script [^>]*id="${id}">([^]*?)</script>`))[1];
const script = html.slice(html.lastIndexOf("<script>") + 8, html.lastIndexOf("</script>"));

class Element {
  constructor() { Object.assign(this, { dataset: {}, listeners: {}, style: {}, hidden: true, value: "", clientWidth: 1100, children: [] }); }
  addEventListener(type, listener) { (this.listeners[type] ??= []).push(listener); }
  fire(type, event = { target: this, preventDefault() {} }) { (this.listeners[type] || []).forEach((listener) => listener(event)); }
  append(...more) { this.children.push(...more); }
  prepend(...more) { this.children.unshift(...more); }
  replaceChildren(...now) { this.children = now; }
  remove() {}
  querySelector() { return null; }
  getContext() { return { measureText: (text) => ({ width: 6 * text.length }) }; }
}

const count = JSON.parse(inside("charts")).length;
const holders = Array.from({ length: count }, () => new Element());
const found = { "#charts": new Element(), "#plotly": new Element(), ".chart": holders[0] };
found["#charts"].textContent = inside("charts");
found["#plotly"].textContent = inside("plotly");
for (const name of ["#find", "#filters", "#theme", "#interactive", "#rank", "main"]) found[name] = new Element();
holders.forEach((holder, index) => { found[`#chart-${index}`] = holder; });
let drawings = 0;
global.window = global;
global.document = {
  documentElement: new Element(), body: new Element(), createElement: () => new Element(),
  head: { append() { global.Plotly = { react() { drawings += 1; }, purge() {} }; } },
  querySelector: (name) => found[name] ?? null, querySelectorAll: (name) => (name === ".chart" ? holders : []),
};
global.getComputedStyle = () => ({ color: "rgb(1, 2, 3)", fontFamily: "sans" });
global.matchMedia = () => ({ matches: false, addEventListener() {} });
global.addEventListener = () => {};

eval(script);
const state = document.documentElement.dataset;
const before = { ...state, drawings };
if (process.argv[3] === "button") found["#interactive"].fire("click");
if (process.argv[3] === "filter") found["#rank"].fire("change", { target: { value: "2" } });
if (process.argv[3] === "chart") holders[count - 1].fire("click");
const until = setInterval(() => {
  if (state.charts === "pictures") return;
  clearInterval(until);
  console.log(JSON.stringify({ before, after: { ...state, drawings }, charts: count, drawn: holders.map((one) => Number(one.dataset.drawn)) }));
}, 10);
