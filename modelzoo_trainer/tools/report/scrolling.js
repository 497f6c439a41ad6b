/* Say that a table goes on beyond the edge of the page, and keep headings below the bar on top. */
(() => {
  "use strict";

  const bar = document.getElementById("controls");
  const frames = Array.from(document.querySelectorAll(".scroll"), (frame) => {
    const hint = document.createElement("p");
    hint.className = "hint";
    hint.textContent = "The table goes on to the right: scroll it sideways.";
    frame.after(hint);
    return { frame, hint };
  });

  function look() {
    for (const { frame, hint } of frames) {
      const beyond = frame.scrollWidth - frame.clientWidth;
      hint.hidden = beyond < 2;
      frame.classList.toggle("goes-on", beyond - frame.scrollLeft >= 2);
    }
    document.documentElement.style.scrollPaddingTop = `${bar.offsetHeight + 8}px`;
  }

  for (const { frame } of frames) frame.addEventListener("scroll", look);
  document.addEventListener("toggle", look, true); // of <details>
  addEventListener("resize", look);
  look();
})();
