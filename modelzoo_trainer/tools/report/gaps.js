/* Where the lines of a run are interrupted: between its end and its restart. */
const gaps = (() => {
  "use strict";

  /** Points with a gap in each pause, a pair of a start and an end; x increases. */
  function cut(x, y, pauses) {
    const found = { x: [], y: [] };
    let next = 0;
    x.forEach((value, idx) => {
      if (idx && value !== null && x[idx - 1] !== null) {
        while (next < pauses.length && pauses[next][1] <= x[idx - 1]) next += 1;
        if (next < pauses.length && pauses[next][1] <= value) {
          found.x.push(null);
          found.y.push(null);
        }
      }
      found.x.push(value);
      found.y.push(y[idx]);
    });
    return found;
  }

  /** A thin vertical line at each restart, as shapes of a layout. */
  function lines(x, color) {
    return x.map((at) => ({
      type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", layer: "below", opacity: 0.7,
      line: { color, width: 1, dash: "dot" },
    }));
  }

  return { cut, lines };
})();
