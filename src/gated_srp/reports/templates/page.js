"use strict";
// Sorting: numbers as numbers, words as words, what is empty last in both directions.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => row.cells[column].dataset.key;
    const compare = (a, b) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const numbers = a.trim() !== "" && b.trim() !== "" && !isNaN(a) && !isNaN(b);
      const order = numbers ? a - b : a.localeCompare(b, "en", {numeric: true});
      return down ? -order : order;
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
  }));
}
// Search: rows that hold every word.
for (const field of document.querySelectorAll("input[type=search]")) {
  const rows = [...document.getElementById(field.dataset.table).tBodies[0].rows];
  const count = document.querySelector(`output[for="${field.id}"]`);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length}`;
  });
}
// Switches: a picture without a layer belongs to every layer.
for (const form of document.querySelectorAll("form.switches")) {
  const home = document.getElementById(form.dataset.gallery);
  const show = () => {
    const chosen = new FormData(form);
    const fits = (have, wanted) => !wanted || have === wanted;
    let shown = 0;
    for (const figure of home.querySelectorAll("figure")) {
      const {slide, value, layer} = figure.dataset;
      const seen = fits(slide, chosen.get("slide")) && fits(value, chosen.get("value")) && (layer === "" || fits(layer, chosen.get("layer")));
      figure.hidden = !seen;
      shown += seen;
    }
    home.querySelector(".none").hidden = shown > 0;
  };
  form.addEventListener("change", show);
  form.addEventListener("submit", event => event.preventDefault());
  show();
}
// A slide of the table leads to its maps, also to those that are folded.
const unfold = name => { const at = /^#map\d+$/.test(name) && document.querySelector(name); if (at && at.closest("details")) at.closest("details").open = true; return at; };
for (const link of document.querySelectorAll('a[href^="#map"]')) link.addEventListener("click", () => unfold(link.hash));
if (unfold(location.hash)) document.querySelector(location.hash).scrollIntoView();
for (const link of document.querySelectorAll("a[data-slide]")) link.addEventListener("click", () => {
  const choice = document.querySelector("form.switches select[name=slide]");
  if (choice) { choice.value = link.dataset.slide; choice.dispatchEvent(new Event("change", {bubbles: true})); }
});
