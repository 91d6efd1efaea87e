"use strict";
// Sorting is all that this does: without it the page says the same.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const value = (row, i) => {
    const given = row.cells[i].dataset.v;
    return given === undefined ? row.cells[i].textContent : given === "" ? null : Number(given);
  };
  heads.forEach((head, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row, n) => ({ row, n, v: value(row, i) }));
      rows.sort((a, b) => {
        if (a.v === null || b.v === null) return (a.v === null) - (b.v === null) || a.n - b.n;
        const order = typeof a.v === "number" ? a.v - b.v : a.v < b.v ? -1 : a.v > b.v ? 1 : 0;
        return (down ? -order : order) || a.n - b.n;
      });
      body.append(...rows.map((entry) => entry.row));
    });
  });
}
// A closed section would be missing on paper in browsers that do not open it by style alone.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
