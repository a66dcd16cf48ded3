// The transcript, line by line, the newest last. It stays when a connection is lost.

import { $, element } from "./dom.js";

export class Transcript {
  constructor() {
    this.lines = new Map(); // by item
  }

  // Appends text to an item's line; it may come in pieces.
  say(itemId, who, text) {
    this.line(itemId, who).append(text);
    scroll();
  }

  // Tells how long the user spoke, before the words that may be there already.
  spoke(itemId, seconds) {
    const line = this.line(itemId, "you");
    line.querySelector(".who").after(`spoke for ${seconds.toFixed(1)} s`);
    scroll();
  }

  // Writes the transcript of the user's speech: pieces first, then the whole text.
  write(itemId, text, isWhole) {
    const line = this.line(itemId, "you");
    let words = line.querySelector(".words");
    if (!words) {
      words = element("span", "words", "");
      line.append(": ", words);
    }
    words.textContent = isWhole ? text : words.textContent + text;
    scroll();
  }

  note(itemId, text) {
    const line = this.lines.get(itemId);
    // The server and the page both cut an item, mostly at the same place.
    if (line?.lastElementChild?.textContent === ` — ${text}`) return;
    line?.append(element("span", "note", ` — ${text}`));
  }

  // kind: note or error.
  tell(who, kind, text) {
    addLine(who).append(element("span", kind, text));
    scroll();
  }

  line(itemId, who) {
    if (!this.lines.has(itemId)) this.lines.set(itemId, addLine(who));
    return this.lines.get(itemId);
  }
}

function addLine(who) {
  const line = document.createElement("li");
  line.append(element("span", "who", who));
  $("transcript").append(line);
  return line;
}

function scroll() {
  $("transcript").scrollTop = $("transcript").scrollHeight;
}
