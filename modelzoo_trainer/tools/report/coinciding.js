/* Where curves of a chart coincide, as they are drawn. */
const coinciding = (() => {
  "use strict";

  const CLOSE = 0.005; // of the range of values: less is not seen
  const SHORTEST = 0.03; // of the width of a chart: shorter stretches are not marked
  const MOST = 4; // curves under a curve that are shown
  // pixels from stripe to stripe, and of a stripe; those of Plotly's dashes keep their gaps
  const LENGTHS = { solid: [10, 10], dash: [18, 9], dot: [6, 3] };

  /** The values of another curve at some x, by linear interpolation; NaN outside of it. */
  function valuesAt(xs, other) {
    let at = 0;
    const last = other.x.length - 1;
    return xs.map((x) => {
      while (at < last && other.x[at + 1] <= x) at += 1;
      if (x < other.x[0] || x > other.x[last]) return NaN;
      if (other.x[at] === x || at === last) return other.y[at];
      const share = (x - other.x[at]) / (other.x[at + 1] - other.x[at]);
      return other.y[at] + share * (other.y[at + 1] - other.y[at]);
    });
  }

  /** Pairs of the first and last point of each stretch along which a curve lies on another one. */
  function stretches(curve, other, close, shortest) {
    const found = [];
    const there = valuesAt(curve.x, other);
    let first = -1;
    for (let idx = 0; idx <= curve.x.length; idx += 1) {
      const isOn = idx < curve.x.length && Math.abs(curve.y[idx] - there[idx]) <= close;
      if (isOn && first < 0) first = idx;
      if (!isOn && first >= 0) {
        if (idx - 1 > first && curve.x[idx - 1] - curve.x[first] >= shortest) found.push([first, idx - 1]);
        first = -1;
      }
    }
    return found;
  }

  function sizes(curves) {
    let left = Infinity;
    let right = -Infinity;
    const values = [];
    for (const { x, y } of curves) {
      for (const one of x) {
        left = Math.min(left, one);
        right = Math.max(right, one);
      }
      for (const one of y) if (Number.isFinite(one)) values.push(one);
    }
    values.sort((one, other) => one - other);
    const at = (share) => values[Math.round(share * (values.length - 1))] || 0;
    const largest = Math.max(Math.abs(at(0)), Math.abs(at(1)));
    // without spikes, which would make all else look close
    return { width: right - left, close: Math.max(CLOSE * (at(0.95) - at(0.05)), 1e-7 * largest) };
  }

  /**
   * Stripes in the color of curves that others cover.
   *
   * curves: x, y, color, dash, variant and run, in the order in which they are drawn.
   */
  function stripes(curves, isLog) {
    const scaled = curves.map((one) => ({ ...one, y: isLog ? one.y.map(Math.log10) : one.y }));
    const { width, close } = sizes(scaled);
    const found = [];
    scaled.forEach((curve, idx) => {
      const under = scaled.slice(0, idx)
        .filter((one) => one.variant === curve.variant && one.run !== curve.run)
        .map((one) => ({ ...one, parts: stretches(curve, one, close, SHORTEST * width) }))
        .filter((one) => one.parts.length)
        .slice(0, MOST);
      under.forEach((one, place) => {
        const x = [];
        const y = [];
        for (const [first, last] of one.parts) {
          x.push(...curve.x.slice(first, last + 1), null);
          y.push(...curves[idx].y.slice(first, last + 1), null);
        }
        found.push({ x, y, color: one.color, dash: dash(curve.dash, place, under.length), over: curve.run });
      });
    });
    return found;
  }

  /** A stripe in each period of one for every curve; the first place is of the curve on top. */
  function dash(kind, place, num) {
    const [apart, length] = LENGTHS[kind] || LENGTHS.solid;
    return `0px,${apart * (place + 1)}px,${length}px,${apart * (num - place) - length}px`;
  }

  /** Split groups of runs by a test whether two of them are equal. */
  function regrouped(group, areEqual) {
    const found = [];
    for (const run of group) {
      const same = found.find(([first]) => areEqual(first, run));
      if (same) same.push(run);
      else found.push([run]);
    }
    return found.filter((one) => one.length > 1);
  }

  return { stripes, regrouped };
})();
