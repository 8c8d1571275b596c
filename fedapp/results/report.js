"use strict";
// Buttons that show one figure of a group, heads of tables that sort, and a method that is highlighted. Without this
// script all figures stand below each other, and tables keep their order.
const button = (to, press) => {
  const made = document.createElement("button");
  made.type = "button";
  made.addEventListener("click", press);
  to.append(made);
  return made;
};

for (const group of document.querySelectorAll(".switch")) {
  const figures = [...group.querySelectorAll(":scope > figure")];
  if (figures.length < 2) continue;
  const bar = document.createElement("div");
  const show = (chosen) => figures.forEach((figure, i) => {
    figure.hidden = i !== chosen;
    bar.children[i].setAttribute("aria-pressed", i === chosen);
  });
  bar.className = "bar";
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", group.dataset.name);
  figures.forEach((figure, i) => {
    button(bar, () => show(i)).textContent = figure.querySelector("h3").textContent;
  });
  group.prepend(bar);
  show(0);
}

const UNITS = { kB: 1e3, MB: 1e6, GB: 1e9, min: 60, h: 3600 };
const number = (cell) => {
  const [, digits, unit] = /^([+-]?[\d,.]+)\s*(kB|MB|GB|min|h)?\b/.exec(cell.textContent.trim()) || [];
  return parseFloat((digits || "").replaceAll(",", "")) * (UNITS[unit] || 1);
};
for (const table of document.querySelectorAll(".table table")) {
  const [body] = table.tBodies;
  const heads = [...table.tHead.rows[0].cells];
  if (body.rows.length < 3) continue;
  heads.forEach((head, column) => {
    const words = [...head.childNodes];
    button(head, () => {
      const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [number(row.cells[column]), row.cells[column].textContent, row]);
      rows.sort(([a, s], [b, t]) => {
        if (isNaN(a) !== isNaN(b)) return isNaN(a) ? 1 : -1;
        return sign * (isNaN(a) ? s.localeCompare(t) : a - b);
      });
      body.append(...rows.map(([, , row]) => row));
    }).append(...words);
  });
}

const choice = document.querySelector("#highlight");
if (choice) {
  choice.closest("p").hidden = false;
  choice.addEventListener("change", () => {
    const name = choice.value && choice.selectedOptions[0].textContent;
    for (const mark of document.querySelectorAll("[data-method]")) {
      mark.style.opacity = choice.value && mark.dataset.method !== choice.value ? 0.12 : "";
    }
    for (const row of document.querySelectorAll(".table tbody tr")) {
      row.classList.toggle("strong", row.cells[0].textContent.replace(/ \*$/, "") === name);
    }
  });
}
