"use strict";
for (const sheet of document.querySelectorAll(".sheet")) {
  const table = sheet.querySelector("table");
  const body = table.tBodies[0];
  const original = [...body.rows];
  const heads = [...table.tHead.rows[1].cells];

  // numbers by value, names by the alphabet, gaps always last
  const sort = (column, order) => {
    const key = (row) => row.cells[column].dataset.v;
    const compare = (a, b) => {
      const x = key(a), y = key(b);
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      const difference = column === 0 ? x.localeCompare(y, undefined, { numeric: true }) : x === y ? 0 : x - y;
      return order === "ascending" ? difference : -difference;
    };
    const rows = order === "none" ? original : [...original].sort(compare);
    body.append(...rows);
    table.classList.toggle("sorted", order !== "none");
    heads.forEach((head, i) => head.setAttribute("aria-sort", i === column ? order : "none"));
  };
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    const first = button.dataset.first;
    const next = { none: first, [first]: first === "ascending" ? "descending" : "ascending" };
    button.addEventListener("click", () => sort(column, next[head.getAttribute("aria-sort")] || "none"));
  });

  const radios = [...sheet.querySelectorAll("input[type=radio]")];
  const show = (radio) => {
    radio.checked = true;
    sheet.dataset.show = radio.value;
  };
  for (const radio of radios) radio.addEventListener("change", () => show(radio));
  // one metric at a time where the screen is narrow
  if (radios.length && matchMedia("(max-width: 720px)").matches) show(radios.at(-2));
  sheet.querySelector("[data-intervals]").addEventListener("change", (event) => {
    sheet.classList.toggle("with-intervals", event.target.checked);
  });
}
for (const box of document.querySelectorAll("figure .scroll")) {
  const toggle = () => box.classList.toggle("enlarged");
  box.addEventListener("click", toggle);
  box.addEventListener("keydown", (event) => event.key === "Enter" && toggle());
}
