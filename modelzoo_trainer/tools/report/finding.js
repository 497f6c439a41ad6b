/* Show the charts whose names have all words that are looked for. */
const finding = (() => {
  "use strict";

  /** cards: each with its element `card` and its `chart`. */
  function find(cards, text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { card, chart } of cards) {
      const names = [chart.title, ...chart.members].join(" ").toLowerCase();
      card.hidden = !words.every((word) => names.includes(word));
    }
    for (const more of document.querySelectorAll("details.more")) {
      if (words.length && !("before" in more.dataset)) more.dataset.before = more.open ? "open" : "";
      more.hidden = !hasShownCard(more);
      if (words.length) more.open = true;
      else if ("before" in more.dataset) {
        more.open = more.dataset.before === "open";
        delete more.dataset.before;
      }
    }
    for (const section of document.querySelectorAll("section")) {
      if (!section.querySelector("figure[data-chart]")) continue;
      section.hidden = !hasShownCard(section);
      for (const link of document.querySelectorAll(`nav a[href="#${section.id}"]`)) link.hidden = section.hidden;
    }
    document.getElementById("none-found").hidden = !words.length || cards.some(({ card }) => !card.hidden);
  }

  function hasShownCard(part) {
    return part.querySelector("figure[data-chart]:not([hidden])") !== null;
  }

  return { find };
})();
