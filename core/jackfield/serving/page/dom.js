// Elements are made here and nowhere else: text is put in as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; a child that is no element becomes text. */
export function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return found;
}

/** A table; cells of the columns in `numbers` stand at the right. */
export function table(head, rows, numbers = []) {
  const cell = (tag, at, text) => make(tag, numbers.includes(at) ? { class: "number" } : {}, text);
  const line = (tag, cells) => make("tr", {}, ...cells.map((text, at) => cell(tag, at, text)));
  return make("table", {},
    make("thead", {}, line("th", head)), make("tbody", {}, ...rows.map((row) => line("td", row))));
}
