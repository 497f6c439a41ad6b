/* Draws the charts of the report with Plotly; nothing is fetched. */
(() => {
  "use strict";

  const { COLORS, DASHES, KIND_COLORS, CONFIG, style, axis, titled, baseLayout } = looks;
  const data = JSON.parse(document.getElementById("data").textContent);
  const UNITS = [[172800, 86400, "days"], [7200, 3600, "h"], [180, 60, "min"], [0, 1, "s"]];
  const FEW = 60; // points of a curve that is drawn with marks
  const KEY = "modelzoo-trainer report " + location.pathname;

  const state = Object.assign(
    {
      x: "step", smoothing: 0, link: "section", hidden: [], log: {}, wide: {}, member: {}, off: {}, find: "",
      zoom: { x: {}, y: {}, timeline: {}, unit: null },
    },
    data.version === null ? {} : stored(),
  );

  function stored() {
    try {
      return JSON.parse(sessionStorage.getItem(KEY)) || {};
    } catch {
      return {};
    }
  }

  function store() {
    if (data.version === null) return;
    try {
      sessionStorage.setItem(KEY, JSON.stringify(state));
    } catch { /* private mode: the state is lost with the page */ }
  }

  // ---- values

  const TYPES = { i4: Int32Array, f4: Float32Array, f8: Float64Array };

  function unpacked([type, text]) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    return Array.from(new TYPES[type](bytes.buffer));
  }

  function unpack(points) {
    for (const key of ["step", "time", "value"]) {
      if (points[key]) points[key] = unpacked(points[key]);
    }
  }

  function unpackCurve(curve) {
    if (typeof curve.value[1] !== "string") return;
    unpack(curve);
    if (curve.mean) unpack(curve.mean);
    if (curve.bad) unpack(curve.bad);
  }

  function escaped(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function epochsOf(run, steps) {
    const [known, epochs] = data.runs[run].epochs;
    if (known.length < 2) return null;
    let at = 0;
    return steps.map((step) => {
      while (at < known.length - 2 && step > known[at + 1]) at += 1;
      while (at > 0 && step < known[at]) at -= 1;
      const share = (step - known[at]) / (known[at + 1] - known[at] || 1);
      return epochs[at] + share * (epochs[at + 1] - epochs[at]);
    });
  }

  function unitOf(longest) {
    return UNITS.find(([from]) => longest >= from);
  }

  const longest = { value: null };

  function timeUnit() {
    if (longest.value === null) {
      longest.value = 0;
      for (const kinds of data.timeline) {
        for (const spans of Object.values(kinds)) {
          for (const [start, length] of spans) longest.value = Math.max(longest.value, start + length);
        }
      }
    }
    return unitOf(longest.value);
  }

  function xOf(curve, points) {
    if (state.x === "epoch") return epochsOf(curve.run, points.step);
    if (state.x === "time") {
      if (!points.time) return null;
      const [, size] = timeUnit();
      return points.time.map((seconds) => seconds / size);
    }
    return points.step;
  }

  function xTitle() {
    return { step: "step", time: `time since the start (${timeUnit()[2]})`, epoch: "epoch" }[state.x];
  }

  /** The head of what appears on hovering. */
  function xHover() {
    return { step: "step %{x}", time: `%{x} ${timeUnit()[2]}`, epoch: "epoch %{x}" }[state.x];
  }

  /** Exponential moving average, corrected for its beginning. */
  function smoothed(values, weight) {
    let sum = 0;
    let mass = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return sum / mass;
    });
  }

  // ---- charts

  const cards = Array.from(document.querySelectorAll("figure[data-chart]"), (card) => {
    const id = Number(card.dataset.chart);
    const chart = data.charts[id];
    return { id, card, chart, div: card.querySelector(".plot"), seen: false, drawn: false };
  });

  function groupOf(item) {
    if (state.link === "page") return "page";
    return state.link === "section" ? item.chart.section : `chart ${item.id}`;
  }

  function isLog(item) {
    if (item.chart.title in state.log) return state.log[item.chart.title];
    return item.chart.section === "loss" && state.logLosses === true;
  }

  function variantsOf(chart) {
    return Array.from(new Set(chart.curves.map((curve) => curve.variant)));
  }

  function nameOf(curve, several) {
    const run = data.runs.length > 1 ? data.runs[curve.run].name : "";
    return escaped([run, several ? curve.variant : ""].filter(Boolean).join(" \u00b7 ") || "value");
  }

  function tracesOf(item) {
    const { chart } = item;
    const variants = variantsOf(chart);
    const several = variants.length > 1;
    const byMember = several && data.runs.length === 1 && chart.section !== "loss";
    const member = state.member[chart.title] || chart.members[0] || "";
    const off = state.off[item.chart.title] || [];
    const traces = [];
    const lines = [];
    for (const curve of chart.curves) {
      if (chart.members.length && curve.member !== member) continue;
      if (state.hidden.includes(curve.run)) continue;
      unpackCurve(curve);
      const place = variants.indexOf(curve.variant);
      const look = {
        color: COLORS[(byMember ? place : curve.run) % COLORS.length],
        dash: several && !byMember ? DASHES[place % DASHES.length] : "solid",
        name: nameOf(curve, several),
        group: curve.variant,
        visible: off.includes(curve.variant) ? "legendonly" : true,
        isOwn: data.runs.length === 1 && several,
      };
      const own = drawn(curve, look);
      traces.push(...own.map((one) => (one.mode === "markers" ? one : interrupted(one, curve.run))));
      const line = own.filter((one) => one.mode !== "markers").pop();
      if (line && look.visible === true) {
        lines.push({ ...line.line, x: line.x, y: line.y, variant: curve.variant, run: curve.run });
      }
    }
    for (const one of coinciding.stripes(lines, isLog(item))) traces.push(stripe(interrupted(one, one.over)));
    if (several && data.runs.length > 1) traces.push(...variants.map((one, idx) => key(one, idx, off)));
    return traces;
  }

  /** A trace with gaps where its run was interrupted, if x is the time. */
  function interrupted(trace, run) {
    if (state.x !== "time") return trace;
    const [, size] = timeUnit();
    const pauses = data.runs[run].pauses.map(([start, end]) => [start / size, end / size]);
    return { ...trace, ...gaps.cut(trace.x, trace.y, pauses) };
  }

  /** Lines at the restarts of the runs of a chart, unless x is the time. */
  function restarts(item) {
    if (state.x === "time") return [];
    const runs = new Set(item.chart.curves.map((curve) => curve.run));
    return Array.from(runs).filter((run) => !state.hidden.includes(run)).flatMap((run) => {
      const steps = data.runs[run].pauses.map(([, , step]) => step).filter((step) => step !== null);
      const x = state.x === "epoch" ? epochsOf(run, steps) || [] : steps;
      return gaps.lines(x, COLORS[run % COLORS.length]);
    });
  }

  /** A line that shows a curve where another one covers it. */
  function stripe({ x, y, color, dash, over }) {
    return {
      x, y, mode: "lines", line: { color, dash, width: 1.7 }, meta: { over }, showlegend: false, hoverinfo: "skip",
    };
  }

  /** A line of the legend that stands for the curves of all runs. */
  function key(variant, idx, off) {
    return {
      x: [null], y: [null], mode: "lines", name: escaped(variant), meta: variant, hoverinfo: "skip",
      line: { color: style("--muted"), dash: DASHES[idx % DASHES.length], width: 2 },
      visible: off.includes(variant) ? "legendonly" : true,
    };
  }

  function drawn(curve, look) {
    const x = xOf(curve, curve);
    if (x === null) return [];
    const isSmooth = state.smoothing > 0 && curve.smooth && curve.value.length > 2;
    const mode = curve.value.length <= FEW ? "lines+markers" : "lines";
    const base = {
      type: "scatter", name: look.name, meta: look.group, visible: look.visible, mode,
      showlegend: look.isOwn, marker: { color: look.color, size: 5 },
    };
    const line = { color: look.color, dash: look.dash, width: 1.7 };
    const traces = [];
    if (isSmooth) {
      const points = curve.mean || curve;
      traces.push({
        ...base, x, y: curve.value, line, opacity: 0.25, showlegend: false, hoverinfo: "skip",
      }, {
        ...base, mode: "lines", x: xOf(curve, points), line,
        y: smoothed(points.value, state.smoothing),
      });
    } else {
      traces.push({ ...base, x, y: curve.value, line });
    }
    if (curve.bad) traces.push(marks(curve, base, look));
    return traces;
  }

  /** Marks at the edge of a chart where a value is NaN or infinite. */
  function marks(curve, base, look) {
    const { bad } = curve;
    return {
      ...base, mode: "markers", showlegend: false, yaxis: "y2", x: xOf(curve, bad),
      y: bad.kind.map((kind) => (kind === "inf" ? 0.97 : 0.03)), text: bad.kind,
      marker: { symbol: "x", size: 8, color: look.color, line: { color: style("--bad"), width: 1.5 } },
      hovertemplate: `%{text} (${bad.n} such values)<extra>${look.name.replace(/%/g, "&#37;")}</extra>`,
    };
  }

  function layoutOf(item, traces) {
    const { x, y } = state.zoom;
    const { title } = item.chart;
    const hasLegend = traces.some((trace) => trace.showlegend !== false);
    const numCurves = traces.filter((trace) => trace.hoverinfo !== "skip").length;
    return Object.assign(baseLayout(), {
      height: item.card.classList.contains("wide") ? 420 : 280,
      margin: { l: 52, r: 14, t: hasLegend ? 26 : 8, b: 40 },
      hovermode: numCurves <= 8 ? "x unified" : "closest",
      showlegend: hasLegend,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, itemdoubleclick: false },
      xaxis: axis({ title: titled(xTitle()), uirevision: false, ...zooming.shown(x[title]), unifiedhovertitle: { text: xHover() } }),
      yaxis: axis({
        title: titled(item.chart.unit), type: isLog(item) ? "log" : "linear",
        exponentformat: item.chart.unit ? "SI" : "power", nticks: 7, uirevision: false,
        rangemode: item.chart.section === "memory" ? "tozero" : "normal",
        ...zooming.shown(y[title]), ...(isLog(item) ? {} : looks.endsOfConstant(traces)),
      }),
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: restarts(item),
      uirevision: "chart", // what is chosen above a chart, such as panning
    });
  }

  let isLinking = false;

  function draw(item) {
    const traces = tracesOf(item);
    Plotly.react(item.div, traces, layoutOf(item, traces), CONFIG);
    if (!item.drawn) {
      item.drawn = true;
      item.div.on("plotly_relayout", (change) => followZoom(item, change));
      item.div.on("plotly_legendclick", (event) => toggleVariant(item, event));
    }
    item.card.classList.toggle("empty", traces.length === 0);
    noteEqual(item);
  }

  /** Name the runs whose curves are the same, also on this x axis. */
  function noteEqual(item) {
    const place = item.card.querySelector(".equal");
    if (!place) return;
    const found = state.x === "step" ? item.chart.equal : item.chart.equal.flatMap(
      (group) => coinciding.regrouped(group, (one, other) => areAtEqualPlaces(item.chart, one, other)),
    );
    place.textContent = found
      .map((group) => group.map((run) => data.runs[run].name).join(" = ")).join(", ");
  }

  function areAtEqualPlaces(chart, one, other) {
    const [first, second] = [one, other].map((run) => chart.curves
      .filter((curve) => curve.run === run)
      .flatMap((curve) => {
        unpackCurve(curve);
        return xOf(curve, curve) || [NaN];
      }));
    return first.every((x, idx) => Math.abs(x - second[idx]) <= 1e-6 * Math.abs(x));
  }

  function toggleVariant(item, event) {
    const variant = event.data[event.curveNumber].meta;
    const off = new Set(state.off[item.chart.title] || []);
    if (!off.delete(variant)) off.add(variant);
    state.off[item.chart.title] = Array.from(off);
    store();
    draw(item);
    return false; // Plotly is not to do it as well
  }

  function followZoom(item, change) {
    if (isLinking) return;
    const { x, y } = state.zoom;
    const height = zooming.changed(change, "yaxis");
    if (height !== undefined) zooming.keep(y, [item.chart.title], height);
    const range = zooming.changed(change, "xaxis");
    if (range !== undefined) {
      const others = cards.filter((one) => one !== item && groupOf(one) === groupOf(item));
      zooming.keep(x, [item, ...others].map((one) => one.chart.title), range);
      isLinking = true;
      Promise.all(others.filter((one) => one.drawn).map((one) => Plotly.relayout(
        one.div, range ? { "xaxis.range": range.slice() } : { "xaxis.autorange": true },
      ))).finally(() => { isLinking = false; });
    }
    store();
  }

  /** Zoomed times, in the unit of the page: a run that goes on gets another one. */
  function rescaleZoom() {
    const { zoom } = state;
    const [, size] = timeUnit();
    if (zoom.unit !== null && zoom.unit !== size) {
      zooming.rescale(zoom.timeline, zoom.unit / size);
      if (state.x === "time") zooming.rescale(zoom.x, zoom.unit / size);
    }
    zoom.unit = size;
  }

  function redraw() {
    for (const item of cards) if (item.seen) draw(item);
    drawTimeline();
    store();
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const item = cards.find((one) => one.card === entry.target);
      if (entry.isIntersecting && !item.seen) {
        item.seen = true;
        draw(item);
        seen.unobserve(item.card);
      }
    }
  }, { rootMargin: "800px" });

  // ---- timeline

  let hasTimeline = false;

  function drawTimeline() {
    const div = document.getElementById("timeline");
    if (!div) return;
    const shown = data.runs.map((_, idx) => idx).filter((idx) => !state.hidden.includes(idx));
    const [, size, unit] = timeUnit();
    const traces = Object.entries(data.kinds).map(([kind, title]) => {
      const trace = {
        type: "bar", orientation: "h", name: title, x: [], base: [], y: [], text: [],
        marker: { color: KIND_COLORS[kind], line: { width: 0 } }, textposition: "none",
        hovertemplate: "%{text}<extra></extra>", width: 0.6,
      };
      for (const run of shown) {
        for (const [start, length, step] of data.timeline[run][kind] || []) {
          trace.x.push(length / size);
          trace.base.push(start / size);
          trace.y.push(shown.indexOf(run));
          const at = step === null ? "" : `, step ${step}`;
          trace.text.push(`${title}${at}: ${length.toPrecision(3)} s<br>from ${(start / size).toPrecision(4)} ${unit}`);
        }
      }
      return trace;
    }).filter((trace) => trace.x.length);
    const height = 110 + 30 * shown.length;
    div.style.height = `${height + 14}px`;
    Plotly.react(div, traces, Object.assign(baseLayout(), {
      barmode: "overlay", height, hovermode: "closest",
      margin: { l: 20, r: 14, t: 34, b: 44 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, traceorder: "normal" },
      showlegend: true,
      xaxis: axis({
        title: titled(`time since the start of the run (${unit})`), zeroline: false, uirevision: false,
        ...zooming.shown(state.zoom.timeline.x),
      }),
      yaxis: axis({
        tickvals: shown.map((_, idx) => idx), autorange: "reversed", fixedrange: true, showgrid: false,
        zeroline: false,
        ticktext: shown.map((run) => (data.runs.length > 1 ? `${escaped(data.runs[run].name)}  ` : "")),
      }),
      uirevision: "timeline",
    }), CONFIG);
    if (hasTimeline) return;
    hasTimeline = true;
    div.on("plotly_relayout", (change) => {
      const range = zooming.changed(change, "xaxis");
      if (range !== undefined) zooming.keep(state.zoom.timeline, ["x"], range);
      store();
    });
  }

  // ---- controls

  const byId = (id) => document.getElementById(id);

  function press(button, isOn) {
    button.setAttribute("aria-pressed", String(isOn));
  }

  function paintRuns() {
    for (const label of document.querySelectorAll("[data-run]")) {
      const run = Number(label.dataset.run);
      label.style.setProperty("--run", COLORS[run % COLORS.length]);
      if (label.classList.contains("chip")) press(label, !state.hidden.includes(run));
    }
  }

  function toggleRun(run, isAlone) {
    const all = data.runs.map((_, idx) => idx);
    const shown = all.filter((idx) => !state.hidden.includes(idx));
    if (isAlone) {
      state.hidden = shown.length === 1 && shown[0] === run ? [] : all.filter((idx) => idx !== run);
    } else {
      state.hidden = state.hidden.includes(run)
        ? state.hidden.filter((idx) => idx !== run) : [...state.hidden, run];
    }
    paintRuns();
    redraw();
  }

  function bindControls() {
    byId("x-axis").value = state.x;
    byId("x-axis").onchange = (event) => {
      state.x = event.target.value;
      Object.assign(state.zoom, { x: {}, y: {} });
      redraw();
    };
    const hasEpochs = data.runs.some((run) => run.epochs[0].length > 1);
    const hasTimes = data.charts.some((chart) => chart.curves.some((curve) => curve.time));
    byId("x-axis").options[1].disabled = !hasTimes;
    byId("x-axis").options[2].disabled = !hasEpochs;
    byId("smoothing").value = state.smoothing;
    byId("smoothing-value").textContent = state.smoothing;
    byId("smoothing").oninput = (event) => {
      state.smoothing = Number(event.target.value);
      byId("smoothing-value").textContent = state.smoothing;
      redraw();
    };
    byId("log-losses").checked = state.logLosses === true;
    byId("log-losses").onchange = (event) => {
      state.logLosses = event.target.checked;
      for (const item of cards) {
        if (item.chart.section === "loss") {
          delete state.log[item.chart.title];
          delete state.zoom.y[item.chart.title];
          press(item.card.querySelector(".log"), isLog(item));
        }
      }
      redraw();
    };
    byId("link").value = state.link;
    byId("link").onchange = (event) => {
      state.link = event.target.value;
      store();
    };
    byId("find").value = state.find;
    byId("find").oninput = (event) => {
      state.find = event.target.value;
      finding.find(cards, state.find);
      store();
    };
    for (const chip of document.querySelectorAll(".chip")) {
      chip.onclick = (event) => toggleRun(Number(chip.dataset.run), event.altKey);
      chip.ondblclick = () => toggleRun(Number(chip.dataset.run), true);
    }
  }

  function bindCards() {
    for (const item of cards) {
      const log = item.card.querySelector(".log");
      const wide = item.card.querySelector(".wide");
      const member = item.card.querySelector(".member");
      press(log, isLog(item));
      log.onclick = () => {
        state.log[item.chart.title] = !isLog(item);
        delete state.zoom.y[item.chart.title];
        press(log, isLog(item));
        store();
        draw(item);
      };
      const stretch = (isWide) => {
        item.card.classList.toggle("wide", isWide);
        press(wide, isWide);
      };
      stretch(Boolean(state.wide[item.chart.title]));
      wide.onclick = () => {
        state.wide[item.chart.title] = !state.wide[item.chart.title];
        stretch(state.wide[item.chart.title]);
        store();
        draw(item);
        Plotly.Plots.resize(item.div);
      };
      if (member) {
        member.value = state.member[item.chart.title] || item.chart.members[0];
        member.onchange = () => {
          state.member[item.chart.title] = member.value;
          delete state.zoom.y[item.chart.title];
          store();
          draw(item);
        };
      }
      seen.observe(item.card);
    }
  }

  function watch() {
    if (data.version === null) return;
    setInterval(async () => {
      try {
        const answer = await fetch("version", { cache: "no-store" });
        const version = answer.ok ? await answer.text() : data.version;
        document.body.classList.remove("stale");
        if (version !== data.version) location.reload();
      } catch {
        document.body.classList.add("stale"); // the server is gone; the page stays as it is
      }
    }, 2000);
  }

  rescaleZoom();
  paintRuns();
  bindControls();
  bindCards();
  finding.find(cards, state.find);
  drawTimeline();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  watch();
})();
