/* The ranges to which axes are zoomed, by the names of charts. */
const zooming = (() => {
  "use strict";

  /** The new range of an axis after a change of a layout; null = reset, undefined = unchanged. */
  function changed(change, axis) {
    if (`${axis}.range[0]` in change) return [change[`${axis}.range[0]`], change[`${axis}.range[1]`]];
    if (change[`${axis}.range`]) return change[`${axis}.range`].slice();
    return change[`${axis}.autorange`] ? null : undefined;
  }

  function keep(ranges, names, range) {
    for (const name of names) {
      if (range) ranges[name] = range.slice();
      else delete ranges[name];
    }
  }

  /** The part of an axis in a layout. */
  function shown(range) {
    return range ? { range: range.slice(), autorange: false } : { autorange: true };
  }

  /** Multiply ranges that are in another unit than before. */
  function rescale(ranges, factor) {
    for (const [name, range] of Object.entries(ranges)) ranges[name] = range.map((end) => end * factor);
  }

  return { changed, keep, shown, rescale };
})();
