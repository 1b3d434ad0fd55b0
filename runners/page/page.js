"use strict";
// Sorting, filtering and the card of a run. The page shows all its numbers without this.

const data = JSON.parse(document.getElementById("data").textContent);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const body = document.querySelector("#runs tbody");
const rows = all("tr[data-entry]", body);

function element(tag, name, ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children);
  return made;
}

// -- the card: seeds, configuration, command ---------------------------------------------------------------------------

function pairs(items, name) {
  return items.map(([path, value]) => element("tr", name, element("td", "", path), element("td", "", value)));
}

function describe(entry, { seed, at }, whole) {
  const { name, cell, values } = data.entries[entry];
  const { runs, config, command, code } = data.cells[cell];
  const card = element("div", "card", element("h3", "", name));
  if (at) card.append(element("p", "hint", `This mark: ${at}. Below: the mean over all evaluation cells.`));
  const seeds = runs.map(([number, how]) => element("tr", String(number) === seed ? "lit" : "",
    element("td", "", `seed ${number}`), element("td", "value", values[number] ?? "–"), element("td", "", how)));
  card.append(element("table", "seeds", ...seeds), element("code", "", command));
  card.append(element("table", "config", ...pairs(config, ""), ...(whole ? pairs(data.shared, "shared") : [])));
  if (!whole) card.append(element("p", "hint", "Click for the whole configuration."));
  card.append(element("p", "hint", code));
  return card;
}

const floating = element("div");
floating.id = "card";
floating.hidden = true;
document.body.append(floating);

function entryOf(target) {
  return target.dataset.entry ?? String(data.cells[target.dataset.cell].entry);
}

function show(target, x, y) {
  floating.replaceChildren(describe(entryOf(target), target.dataset, false));
  floating.hidden = false;
  const { width, height } = floating.getBoundingClientRect();
  const right = x + 16 + width > innerWidth ? x - width - 16 : x + 16;
  floating.style.left = `${Math.max(4, right)}px`;
  floating.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - height - 4))}px`;
}

function light(row) {
  document.body.classList.toggle("hot", row !== undefined);
  for (const drawn of all("g[data-row], .legend [data-row]")) drawn.classList.toggle("lit", drawn.dataset.row === row);
}

document.addEventListener("pointerover", (event) => {
  const target = event.target.closest("[data-cell]");
  if (target && !event.target.closest(".detail")) show(target, event.clientX, event.clientY);
  else floating.hidden = true;
  light(event.target.closest("[data-row]")?.dataset.row);
});
document.addEventListener("focusin", (event) => {
  const target = event.target.closest("tr[data-entry]");
  if (!target || !target.matches(":focus-visible")) return;
  const { left, bottom } = target.getBoundingClientRect();
  show(target, left, bottom);
});
document.addEventListener("focusout", () => { floating.hidden = true; });

function pin(row) {
  floating.hidden = true;
  if (row.nextElementSibling?.className === "detail") return row.nextElementSibling.remove();
  const cell = element("td", "", describe(row.dataset.entry, {}, true));
  cell.colSpan = row.cells.length;
  row.after(element("tr", "detail", cell));
}

body.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-entry]");
  if (row) pin(row);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") floating.hidden = true;
  if ((event.key === "Enter" || event.key === " ") && event.target.matches("tr[data-entry]")) {
    event.preventDefault();
    pin(event.target);
  }
});

// -- sorting -----------------------------------------------------------------------------------------------------------

function worth(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.sort ?? cell.textContent.trim();
  const number = text.match(/^[+-]?[\d.,]+(e[+-]?\d+)?(?=$|[\s/(†±])/);
  return number ? Number(number[0].replaceAll(",", "")) : text === "–" ? "" : text;
}

function compare(a, b) { // numbers before words
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
}

function sort(head, column) {
  const next = { ascending: "descending", descending: "none" }[head.ariaSort] ?? "ascending";
  for (const other of all("#runs th")) other.ariaSort = "none";
  head.ariaSort = next;
  all(".detail", body).forEach((detail) => detail.remove());
  const keyed = rows.map((row) => [worth(row, column), row]);
  const sign = next === "descending" ? -1 : 1;
  const missing = (key) => key === "";
  if (next !== "none") keyed.sort(([a], [b]) => missing(a) - missing(b) || sign * compare(a, b)); // nothing comes last
  body.append(...keyed.map(([, row]) => row));
}

all("#runs th").forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => sort(head, column)));

// -- filtering: words that a row must have, or with a minus must not ---------------------------------------------------

const field = document.getElementById("filter");

function filter() {
  const words = field.value.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
  const fits = (text) => words.every((word) => (word[0] === "-" ? !text.includes(word.slice(1)) : text.includes(word)));
  all(".detail", body).forEach((detail) => detail.remove());
  const cells = new Set();
  for (const row of rows) {
    row.hidden = !fits(row.dataset.text.toLowerCase());
    if (!row.hidden) cells.add(row.dataset.cell);
  }
  for (const mark of all("figure [data-cell]")) mark.classList.toggle("off", !cells.has(mark.dataset.cell));
  for (const panel of all("figure")) panel.hidden = !panel.querySelector("[data-cell]:not(.off)");
  document.body.classList.toggle("filtered", words.length > 0);
  document.getElementById("count").value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
}

field.addEventListener("input", filter);
filter();

// -- light and dark ----------------------------------------------------------------------------------------------------

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
