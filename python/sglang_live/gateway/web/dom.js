// The page's elements, by their ids in index.html.

export const $ = (id) => document.getElementById(id);

// Screen readers announce every write, so an unchanged text is not written again.
export function show(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}
