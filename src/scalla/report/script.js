"use strict";
// Switches of the legend: a row's curves, everywhere in its protocol.
for (const chip of document.querySelectorAll("[data-switch]")) {
  chip.addEventListener("click", () => {
    const on = chip.getAttribute("aria-pressed") !== "true";
    chip.setAttribute("aria-pressed", String(on));
    for (const g of document.querySelectorAll(`[data-row="${chip.dataset.switch}"]`)) g.classList.toggle("off", !on);
  });
}

// A link to a row's notes opens them and what they lie in.
function openTarget() {
  let node = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  if (!node) return;
  for (let up = node; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  node.scrollIntoView({ block: "center" });
}
addEventListener("hashchange", openTarget);
openTarget();

// Values under the pointer, read back from the chart itself: pixels → axes.
const tip = document.getElementById("tip");
const number = (v) => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e5) ? v.toExponential(1) : String(Number(v.toPrecision(3))));

function axisOf(text, from, to) {
  const [low, high, log, label] = text.split("|");
  const a = Number(low), b = Number(high);
  return {
    label,
    value: (pixel) => {
      const t = (pixel - from) / (to - from);
      return log === "1" ? a * (b / a) ** t : a + t * (b - a);
    },
  };
}

function targetsOf(svg) {
  const [x0, x1, y0, y1] = svg.dataset.box.split(",").map(Number);
  const x = axisOf(svg.dataset.x, x0, x1), y = axisOf(svg.dataset.y, y0, y1);
  const found = [];
  for (const line of svg.querySelectorAll("[data-n]")) {
    for (const pair of line.getAttribute("points").split(" ")) {
      const [px, py] = pair.split(",").map(Number);
      found.push({ px, py, owner: line, text: () => `${line.dataset.n}\n${x.label || "x"} ${number(x.value(px))}, ${y.label || "share"} ${number(y.value(py))}` });
    }
  }
  for (const mark of svg.querySelectorAll("[data-t]")) {
    const box = mark.getBBox();
    found.push({ px: box.x + box.width / 2, py: box.y + box.height / 2, box, owner: mark, text: () => mark.dataset.t });
  }
  return found;
}

function nearest(targets, px, py) {
  let best = null, least = 24;
  for (const t of targets) {
    if (t.owner.closest(".off")) continue;
    const wide = t.owner.classList.contains("bar") && px >= t.box.x && px <= t.box.x + t.box.width;
    const distance = wide ? 0 : Math.hypot(t.px - px, t.py - py);
    if (distance < least) [best, least] = [t, distance];
  }
  return best;
}

for (const svg of document.querySelectorAll("svg.plot")) {
  let targets = null;
  svg.addEventListener("pointermove", (event) => {
    targets ??= targetsOf(svg);
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const hit = nearest(targets, at.x, at.y);
    for (const lit of svg.querySelectorAll(".lit")) lit.classList.remove("lit");
    svg.classList.toggle("dim", Boolean(hit && hit.owner.closest(".s")));
    tip.hidden = !hit;
    if (!hit) return;
    hit.owner.closest(".s")?.classList.add("lit");
    tip.textContent = hit.text();
    tip.style.whiteSpace = "pre-line";
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18}px`;
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    svg.classList.remove("dim");
  });
}
