"use strict";
// Filters, sorting and charts of a report. Charts are pictures first; what asks for more (a click on one, a filter, the
// button) has them drawn by plotly, which is unpacked from the page itself.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);
  const root = document.documentElement;
  const specs = JSON.parse(one("#charts").textContent);
  const state = { rank: "", off: new Set(), text: "" };
  const PRINT_WIDTH = 690;

  // ---------------------------------------------------------------- what the filters keep
  const keepsRank = (rank) => !state.rank || !rank || rank === state.rank;
  const keepsKind = (kind) => !kind || !state.off.has(kind);
  const keepsText = (text) => !state.text || text.toLowerCase().includes(state.text);

  // ---------------------------------------------------------------- tables
  const tables = all("table").map((table) => ({
    table,
    rows: all("tbody tr", table).map((row) => ({ row, text: row.textContent.toLowerCase() })),
  }));

  function filterTables() {
    for (const { rows } of tables) {
      for (const { row, text } of rows) {
        const { rank, kind } = row.dataset;
        row.hidden = !(keepsRank(rank) && keepsKind(kind) && (!state.text || text.includes(state.text)));
      }
    }
  }

  function makeSortable(table) {
    all("thead th", table).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => sortBy(table, head, column));
    });
  }

  function sortBy(table, head, column) {
    const numeric = head.classList.contains("number");
    const falling = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : numeric;
    all("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.sort;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "") || 0; // what is not known comes last either way
      const order = numeric ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true });
      return falling ? -order : order;
    };
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const totals = rows.filter((row) => row.classList.contains("total"));
    body.append(...rows.filter((row) => !row.classList.contains("total")).sort(compare), ...totals);
  }

  // ---------------------------------------------------------------- colours and words
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);

  function colour(word) {
    probe.style.color = `var(--${word.replaceAll(" ", "-")}, var(--plain))`;
    return getComputedStyle(probe).color;
  }

  // Plotly reads mark-up in text; names are text and nothing else.
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const clipped = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const [coarse, fine] = [1, 3].map((digits) => new Intl.NumberFormat("en-GB", { maximumFractionDigits: digits }));
  const number = (value) => {
    const size = Math.abs(value);
    return size >= 100 ? coarse.format(value) : size >= 1 || size === 0 ? fine.format(value) : String(Number(value.toPrecision(3)));
  };

  let width = 0; // of a sheet of paper, while it is printed on
  const fontSize = () => (width ? 10 : 12);
  const canvas = document.createElement("canvas").getContext("2d");

  function widest(texts) {
    canvas.font = `${fontSize()}px ${getComputedStyle(document.body).fontFamily}`;
    return Math.max(0, ...texts.map((text) => canvas.measureText(text).width));
  }

  // Plotly would find these margins itself by drawing every chart twice.
  function margins(labels, names, upright) {
    const left = labels.length ? widest(labels) + 18 : 64;
    const room = (width || one(".chart").clientWidth) - left - 16;
    const entry = widest(names) + 50;
    const inOneRow = names.reduce((sum, name) => sum + widest([name]) + 50, 0) < room;
    const rows = names.length < 2 ? 0 : inOneRow ? 1 : Math.ceil(names.length / Math.max(1, Math.floor(room / entry)));
    return { l: left, r: 16, t: 12 + 21 * rows, b: upright.length ? widest(upright) + 20 : 44, autoexpand: false };
  }

  function layout(more, labels = [], names = [], upright = []) {
    const axis = { gridcolor: colour("grid"), zerolinecolor: colour("rule"), title: { standoff: 8 }, exponentformat: "none", separatethousands: true };
    const base = {
      font: { family: getComputedStyle(document.body).fontFamily, size: fontSize(), color: colour("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: margins(labels, names, upright), hovermode: "closest", dragmode: "zoom",
      hoverlabel: { align: "left", bgcolor: colour("raised"), bordercolor: colour("rule"), font: { color: colour("ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("quiet"), activecolor: colour("ink") },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", xanchor: "left" },
      ...more,
    };
    if (width) base.width = width;
    base.xaxis = { ...axis, ...more.xaxis };
    base.yaxis = { ...axis, ...more.yaxis };
    return base;
  }

  // ---------------------------------------------------------------- the charts
  function bars(spec) {
    const shown = spec.labels.map((_, i) => i).filter(
      (i) => keepsRank(spec.ranks[i]) && (!spec.named || keepsText(spec.labels[i])));
    const flat = shown.length <= 40; // more bars than that stand upright
    const places = shown.map((_, i) => i);
    const data = spec.series.filter((part) => keepsKind(part.kind)).map((part) => {
      const values = shown.map((i) => part.values[i]);
      const text = shown.map((i) => `${plain(spec.labels[i])}<br>${plain(part.name)} ${number(part.values[i] ?? 0)} ${plain(spec.unit)}`);
      const hues = part.colour === "change" ? values.map((v) => colour(v > 0 ? "worse" : "better")) : colour(part.colour);
      return {
        type: "bar", name: plain(part.name), orientation: flat ? "h" : "v", marker: { color: hues, line: { width: 0 } },
        x: flat ? values : places, y: flat ? places : values, hovertext: text, hoverinfo: "text",
      };
    });
    const ticks = shown.map((i) => clipped(spec.labels[i], 44));
    const room = (width || one(".chart").clientWidth) - 80;
    const every = flat ? 1 : Math.max(1, Math.ceil(shown.length * (fontSize() + 3) / room)); // upright labels need a line each
    const ticked = places.filter((place) => place % every === 0);
    const names = { tickvals: ticked, ticktext: ticked.map((place) => plain(ticks[place])), fixedrange: true, showgrid: false, zeroline: false, ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)" };
    const values = { title: { text: plain(spec.unit) }, rangemode: "tozero" };
    const beside = spec.grouped ? spec.series.length : 1;
    const series = spec.series.map((part) => part.name);
    const legend = Math.max(0, margins(flat ? ticks : [], series, []).t - 33); // beyond its first row
    return {
      data, size: shown.length,
      layout: layout({
        barmode: spec.grouped ? "group" : "relative", bargap: 0.28, showlegend: spec.series.length > 1,
        height: legend + (flat ? Math.max(150, 90 + shown.length * (14 + 12 * beside)) : 320),
        xaxis: flat ? values : shown.length > 80 ? { title: { text: "" } } : names,
        yaxis: flat ? { ...names, autorange: "reversed" } : values,
      }, flat ? ticks : [], series, flat || shown.length > 80 ? [] : ticks),
    };
  }

  function lines(spec) {
    const shown = spec.lines.filter((line) => keepsRank(line.rank));
    const data = shown.map((line) => ({
      type: "scatter", mode: "lines", name: plain(line.name), x: line.x, y: line.y,
      line: { color: colour(line.colour), width: line.dashed ? 1.5 : 2, dash: line.dashed ? "dash" : "solid", shape: line.steps ? "hv" : "linear" },
      hovertemplate: `${plain(line.name)}<br>%{x:,.4~g} · %{y:,.4~g}<extra></extra>`,
    }));
    return {
      data, size: shown.length,
      layout: layout({
        height: 320, showlegend: shown.length > 1, xaxis: { title: { text: plain(spec.x_title) } },
        yaxis: { title: { text: plain(spec.y_title) }, rangemode: "tozero" },
      }, [], shown.map((line) => line.name)),
    };
  }

  function scatter(spec) {
    let size = 0;
    const data = spec.points.map((part) => {
      const kept = part.x.map((_, i) => i).filter((i) => part.is_bound || !part.texts.length || keepsText(part.texts[i]));
      const pick = (values) => kept.map((i) => values[i]);
      if (!part.is_bound) size += kept.length;
      return {
        type: "scatter", name: plain(part.name), x: pick(part.x), y: pick(part.y),
        mode: part.is_bound ? "lines" : part.joined ? "lines+markers" : "markers",
        line: { color: colour(part.colour), width: 1.5, dash: part.is_bound ? "dot" : "solid" },
        marker: { color: colour(part.colour), size: part.sizes.length ? pick(part.sizes) : 8, opacity: part.joined ? 1 : 0.75,
          line: { width: 1, color: colour("page") } },
        hovertext: part.texts.length ? pick(part.texts).map((text) => plain(text).replaceAll(" | ", "<br>")) : plain(part.name),
        hoverinfo: "text",
      };
    });
    const kind = spec.logarithmic ? "log" : "linear";
    return {
      data, size,
      layout: layout({
        height: 430, showlegend: spec.points.length > 1,
        xaxis: { title: { text: plain(spec.x_title) }, type: kind, dtick: spec.logarithmic ? 1 : undefined },
        yaxis: { title: { text: plain(spec.y_title) }, type: kind, dtick: spec.logarithmic ? 1 : undefined },
      }, [], spec.points.map((part) => part.name)),
    };
  }

  function timeline(spec) {
    const place = new Map();
    spec.lanes.forEach((lane, index) => { if (keepsRank(lane.rank)) place.set(index, place.size); });
    const match = spec.names.map(keepsText);
    const groups = new Map(spec.kinds.map((_, index) => [index, []]));
    for (let i = 0; i < spec.lane.length; i++) {
      if (place.has(spec.lane[i]) && match[spec.name[i]] && !state.off.has(spec.kinds[spec.kind[i]])) groups.get(spec.kind[i]).push(i);
    }
    const label = (i) => {
      const name = plain(clipped(spec.names[spec.name[i]], 90));
      const many = spec.count[i] > 1 ? `${number(spec.count[i])} tasks, mostly ${name}<br>busy ${number(spec.busy[i])} of ${number(spec.length[i])} ms` : `${name}<br>${number(spec.length[i])} ms`;
      return `${many}<br>at ${number(spec.start[i])} ms, ${plain(spec.lanes[spec.lane[i]].label)}`;
    };
    const data = [];
    let size = 0;
    for (const [kind, boxes] of groups) {
      if (!boxes.length) continue;
      size += boxes.length;
      const hue = colour(spec.kinds[kind]);
      data.push({
        type: "bar", orientation: "h", name: plain(spec.kinds[kind]), base: boxes.map((i) => spec.start[i]),
        x: boxes.map((i) => spec.length[i]), y: boxes.map((i) => place.get(spec.lane[i])), width: 0.72,
        marker: { color: hue, line: { width: 0 }, opacity: boxes.map((i) => (spec.count[i] > 1 ? 0.45 + 0.4 * Math.min(1, spec.busy[i] / spec.length[i]) : 1)) },
        hovertext: boxes.map(label), hoverinfo: "text",
      });
    }
    const path = spec.path_lane.map((lane) => (place.has(lane) ? place.get(lane) : null));
    if (path.some((at) => at !== null) && !state.off.has("critical path")) {
      data.push({
        type: "scatter", mode: "lines", name: "critical path", x: spec.path_time, y: path, connectgaps: false,
        line: { color: colour("critical path"), width: 1.6 }, hoverinfo: "skip",
      });
    }
    const lanes = [...place.keys()];
    return {
      data, size,
      layout: layout({
        barmode: "overlay", height: 110 + 26 * Math.max(lanes.length, 2), showlegend: data.length > 1,
        xaxis: { title: { text: "ms" }, range: [0, spec.span_ms] },
        yaxis: {
          tickvals: lanes.map((_, i) => i), ticktext: lanes.map((i) => plain(spec.lanes[i].label)),
          range: [lanes.length - 0.4, -0.6], fixedrange: true, showgrid: false, zeroline: false, ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)",
        },
      }, lanes.map((i) => spec.lanes[i].label), data.map((part) => part.name)),
    };
  }

  function heat(spec) {
    const wide = spec.columns.length;
    const rows = spec.labels.map((_, i) => i).filter((i) => keepsText(spec.labels[i]));
    const z = rows.map((i) => spec.values.slice(i * wide, (i + 1) * wide));
    const text = rows.map((i, at) => z[at].map((value, j) => `${plain(spec.labels[i])}, ${plain(spec.columns[j])}<br>${number(value ?? 0)} ${plain(spec.unit)}`));
    const ticks = rows.map((i) => clipped(spec.labels[i], 44));
    const every = Math.max(1, Math.ceil(wide / 24));
    const shown = spec.columns.map((_, j) => j).filter((j) => j % every === 0);
    const named = (values, texts) => ({ tickvals: values, ticktext: texts.map(plain), showgrid: false, zeroline: false });
    return {
      data: [{
        type: "heatmap", z, text, hoverinfo: "text", xgap: 1, ygap: 1, zmin: spec.low, zmax: spec.high, showscale: false,
        colorscale: [[0, colour("grid")], [1, colour("worse")]],
      }],
      size: rows.length,
      layout: layout({
        height: 90 + Math.min(22, Math.max(8, 640 / Math.max(rows.length, 1))) * rows.length,
        xaxis: { title: { text: plain(spec.x_title) }, ...named(shown, shown.map((j) => spec.columns[j])) },
        yaxis: { autorange: "reversed", ...named(rows.map((_, at) => at), ticks) },
      }, ticks),
    };
  }

  const makers = { bars, lines, scatter, timeline, heat };
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "toImage"] };

  function draw(index) {
    const holder = one(`#chart-${index}`);
    const made = makers[specs[index].type](specs[index]);
    holder.dataset.drawn = String(made.size);
    if (!made.size) {
      Plotly.purge(holder);
      const empty = document.createElement("p");
      empty.className = "empty";
      empty.textContent = "nothing matches the filters";
      holder.replaceChildren(empty);
      return;
    }
    if (holder.querySelector(".empty")) holder.replaceChildren();
    Plotly.react(holder, made.data, made.layout, config);
  }

  let ready = false;
  let waking = null; // the promise of interactive charts, once they were asked for
  let changed = false; // by a filter, while the charts were still being drawn
  const redraw = () => { if (ready) specs.forEach((_, index) => draw(index)); };
  const filtered = (spec) => spec.type !== "bars" || spec.named || spec.ranks.length || spec.series.some((part) => part.kind);

  function apply() {
    filterTables();
    changed = !ready;
    if (!ready && specs.some(filtered)) wake();
    if (ready) specs.forEach((spec, index) => { if (filtered(spec)) draw(index); });
  }

  // ---------------------------------------------------------------- controls
  function listen() {
    all(".needs-script").forEach((element) => { element.hidden = false; });
    tables.forEach(({ table }) => makeSortable(table));
    const find = one("#find");
    let waiting = 0;
    find.addEventListener("input", () => {
      state.text = find.value.trim().toLowerCase();
      clearTimeout(waiting);
      waiting = setTimeout(apply, 120);
    });
    one("#rank")?.addEventListener("change", (event) => { state.rank = event.target.value; apply(); });
    all("#filters input[name=kind]").forEach((box) => box.addEventListener("change", () => {
      if (box.checked) state.off.delete(box.value); else state.off.add(box.value);
      apply();
    }));
    one("#filters").addEventListener("submit", (event) => event.preventDefault());
    one("#filters").addEventListener("reset", () => { state.rank = ""; state.text = ""; state.off.clear(); apply(); });
    one("#interactive")?.addEventListener("click", wake);
    all(".chart").forEach((holder) => holder.addEventListener("click", wake, { once: true }));
    const prefers = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (root.dataset.theme || (prefers.matches ? "dark" : "light")) === "dark";
    const name = () => { one("#theme").textContent = isDark() ? "light" : "dark"; };
    one("#theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); redraw(); });
    prefers.addEventListener("change", () => { name(); redraw(); });
    name();
    let before;
    addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; width = PRINT_WIDTH; redraw(); });
    addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; width = 0; redraw(); });
  }

  // ---------------------------------------------------------------- plotly, unpacked
  async function load() {
    const packed = one("#plotly");
    const text = atob(packed.textContent);
    packed.remove();
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
    if (!window.Plotly) throw new Error("the chart library could not be unpacked");
  }

  const pause = () => new Promise((go) => setTimeout(go));

  function wake() {
    waking ??= drawAll().catch((error) => {
      root.dataset.charts = "failed";
      const told = document.createElement("p");
      told.className = "note";
      told.textContent = "This browser cannot unpack interactive charts; pictures and tables hold the same numbers.";
      one("main").prepend(told);
      console.error(error);
    });
    return waking;
  }

  async function drawAll() {
    const button = one("#interactive");
    button.disabled = true;
    button.textContent = "drawing …";
    await pause(); // the word is shown first
    await load();
    performance.mark("unpacked");
    changed = false; // what is drawn now knows the filters
    for (let index = 0; index < specs.length; index++) {
      one(`#chart-${index}`).replaceChildren();
      draw(index);
      await pause();
    }
    ready = true;
    button.hidden = true;
    if (changed) apply();
    root.dataset.charts = "drawn";
    performance.mark("drawn");
  }

  listen();
  root.dataset.charts = specs.length ? "pictures" : "drawn";
  root.dataset.page = "ready";
  performance.mark("ready");
})();
