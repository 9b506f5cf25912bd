"use strict";
// Names are data. They become text nodes (append) and never markup.

const element = (id) => document.getElementById(id);

function say(text, bad = false) {
  element("status").textContent = text;
  element("status").className = bad ? "bad" : "";
}

function row({name, version, state}) {
  const link = document.createElement("a");
  link.href = `models/${encodeURIComponent(name)}/`;
  link.append(name);
  const line = document.createElement("tr");
  for (const [tag, part] of [["th", link], ["td", version], ["td", state.toLowerCase()]]) {
    const cell = document.createElement(tag);
    cell.append(part);
    line.append(cell);
  }
  line.firstChild.scope = "row";
  return line;
}

async function load() {
  const key = element("key").value.trim();
  try {
    const response = await fetch("v2/repository/index", {
      method: "POST",
      headers: key ? {authorization: `Bearer ${key}`} : {},
      body: "{}",
    });
    const found = await response.json();
    if (response.status === 401 || response.status === 403) {
      element("key-field").hidden = false;
      element("key").focus();
    }
    if (!response.ok) throw new Error(found.error);
    element("models").replaceChildren(...found.map(row));
    say(found.length ? "" : "There is no model that this key may ask.");
  } catch (error) {
    say(error instanceof TypeError ? "The endpoint does not answer." : error.message, true);
  }
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  load();
});
load();
