/* Colors, fonts and axes of the charts. */
const looks = (() => {
  "use strict";

  const COLORS = [
    "#3b78c3", "#e8862e", "#3f9e57", "#d1495b", "#8a63c9", "#2aa5a5", "#c2569b", "#8c6d46",
    "#b3a22a", "#6f7f8f", "#7fb2ee", "#f6b97a", "#86cf98", "#ef929d", "#bda4e8", "#7ed3d0",
    "#e39bc8", "#c2a27a", "#dccf6d", "#aab6c1",
  ];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const KIND_COLORS = {
    train: "#3f9e57", data: "#b3a22a", validate: "#3b78c3", save: "#8a63c9", startup: "#9aa5b1",
    lost: "#d1495b", down: "#4a4f57", other: "#cfd5db",
  };
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
  const CONFIG = {
    displaylogo: false, responsive: true, showLink: false, plotlyServerURL: "",
    doubleClick: "autosize", // a kept zoom is not what a double click resets to
    modeBarButtonsToRemove: ["lasso2d", "select2d", "resetScale2d"],
  };

  function style(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function axis(more) {
    return Object.assign({
      gridcolor: style("--grid"), linecolor: style("--line"), zerolinecolor: style("--grid"),
      tickfont: { size: 11, color: style("--muted") }, automargin: true, hoverformat: ".6~g",
      title: { font: { size: 11, color: style("--muted") }, standoff: 6 },
    }, more);
  }

  function titled(text) {
    return { text, font: { size: 11, color: style("--muted") }, standoff: 6 };
  }

  function baseLayout() {
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: FONT, size: 12, color: style("--text") },
      hoverlabel: {
        bgcolor: style("--card"), bordercolor: style("--line"), namelength: 40,
        font: { family: FONT, size: 12, color: style("--text") },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--muted"), activecolor: style("--text") },
    };
  }

  /** Plotly would draw a constant such as 0.001 between -1 and 1, and rounding errors as changes. */
  function endsOfConstant(traces) {
    let low = Infinity;
    let high = -Infinity;
    for (const trace of traces) {
      if (trace.yaxis === "y2" || trace.visible !== true) continue;
      for (const value of trace.y) {
        if (value === null) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (!(size > 0 && size < Infinity && high - low <= 1e-6 * size)) return {};
    return { autorangeoptions: { minallowed: Math.min(0, 2 * low), maxallowed: Math.max(0, 2 * high) } };
  }

  return { COLORS, DASHES, KIND_COLORS, CONFIG, style, axis, titled, baseLayout, endsOfConstant };
})();
