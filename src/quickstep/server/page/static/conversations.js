// Conversations as trees of messages, and their store in IndexedDB.
//
// A conversation is {id, title, changed, system, messages, leaf}; `messages` has by id {id, parent,
// role, text, ...}, so that several messages with one parent are branches. The messages from the root
// to `leaf` are those that are displayed.

const DATABASE = "quickstep";
const STORE = "conversations";

export const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

export const newConversation = (system = "") => ({
  id: newId(), title: "", changed: Date.now(), system, messages: {}, leaf: null,
});

/** The messages from the first to `id`. */
export function pathTo(conversation, id) {
  const path = [];
  for (let message = conversation.messages[id]; message; message = conversation.messages[message.parent]) {
    path.unshift(message);
  }
  return path;
}

export const childrenOf = (conversation, id) =>
  Object.values(conversation.messages)
    .filter((message) => message.parent === id)
    .sort((a, b) => a.created - b.created);

export function addMessage(conversation, parent, fields) {
  const message = { id: newId(), parent, created: performance.timeOrigin + performance.now(), ...fields };
  conversation.messages[message.id] = message;
  conversation.leaf = message.id;
  if (!conversation.title && message.role === "user") {
    conversation.title = (message.text || message.attachments?.[0]?.name || "").slice(0, 60);
  }
  return message;
}

/** The answer that had not ended when this page was left; its `before` is what it began with. */
export const unfinished = (conversation) =>
  Object.values(conversation.messages).find((message) => message.before);

/** Take back what came since the answer began. */
export function resetAnswer(answer) {
  const { text, reasoning, numTokens } = answer.before;
  Object.assign(answer, { text, reasoning, tokens: answer.tokens.slice(0, numTokens) });
  delete answer.toolCalls;
}

/** Display the branch of `message`: its newest descendants. */
export function selectBranch(conversation, message) {
  let id = message.id;
  for (let next = childrenOf(conversation, id); next.length; next = childrenOf(conversation, id)) {
    id = next[next.length - 1].id;
  }
  conversation.leaf = id;
}

function database() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(DATABASE, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}

async function transact(mode, act) {
  const opened = await database();
  try {
    return await new Promise((resolve, reject) => {
      const request = act(opened.transaction(STORE, mode).objectStore(STORE));
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
  } finally {
    opened.close();
  }
}

export async function storedConversations() {
  const all = await transact("readonly", (store) => store.getAll());
  return all.sort((a, b) => b.changed - a.changed);
}

export const storeConversation = (conversation) =>
  transact("readwrite", (store) => store.put(conversation));

export const deleteConversation = (id) => transact("readwrite", (store) => store.delete(id));
