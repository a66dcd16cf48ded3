// The page's elements, by the names they have in index.html.

export const $ = (id) => document.getElementById(id);

// Screen readers hear of what changes, so what does not change is not written anew.
export function show(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}
