//! The documentation as a stranger meets it: hardly any comment says too little, twenty public items are shown whose
//! comments somebody may read (`cargo test --test docs -- --nocapture`; `SEED` chooses others), the README shows
//! the program that `scripts/outside.sh` runs, and the cookbook's table has every recipe.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::path::{Path, PathBuf};

use kv_conformance::Random;

/// A comment of this many words or fewer cannot say what a caller may rely on.
const FEW_WORDS: usize = 3;
/// Comments of few words that may stand in the whole tree, where a name says all but a unit or a range.
const MAX_SHORT: usize = 80;

/// A documented item of a library.
struct Item {
    file: PathBuf,
    /// The line of the comment's end.
    line: usize,
    comment: Vec<String>,
    /// The first line of the declaration.
    declaration: String,
}

impl Item {
    fn words(&self) -> usize {
        self.comment.iter().flat_map(|line| line.split_whitespace()).count()
    }

    fn is_public(&self) -> bool {
        self.declaration.starts_with("pub ")
    }
}

/// The sources below a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The documented items of one source. Attributes between a comment and its item are passed over.
fn items_of(file: &Path) -> Vec<Item> {
    let (mut items, mut comment, mut in_attribute) = (Vec::new(), Vec::new(), false);
    for (at, line) in std::fs::read_to_string(file).unwrap().lines().enumerate() {
        let line = line.trim();
        if let Some(text) = line.strip_prefix("///") {
            comment.push(text.strip_prefix(' ').unwrap_or(text).to_owned());
        } else if in_attribute || line.starts_with("#[") {
            in_attribute = !line.ends_with(']');
        } else if !comment.is_empty() {
            let (comment, declaration) = (std::mem::take(&mut comment), line.to_owned());
            items.push(Item { file: file.to_owned(), line: at, comment, declaration });
        }
    }
    items
}

#[test]
fn hardly_any_doc_comment_has_three_words_or_fewer() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    for entry in std::fs::read_dir(root.join("crates")).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut files);
    }
    files.sort();
    let items: Vec<Item> = files.iter().flat_map(|file| items_of(file)).collect();
    let mut public: Vec<&Item> = items.iter().filter(|item| item.is_public()).collect();
    assert!(public.len() > 1000, "only {} documented public items were found", public.len());

    let mut random = Random::new("twenty public items");
    random.shuffle(&mut public);
    for item in &public[..20] {
        println!("\n{}:{}", item.file.strip_prefix(root).unwrap().display(), item.line);
        item.comment.iter().for_each(|line| println!("    /// {line}"));
        println!("    {}", item.declaration);
    }

    let short: Vec<String> = items
        .iter()
        .filter(|item| item.words() <= FEW_WORDS)
        .map(|item| format!("{}:{}: {}", item.file.display(), item.line, item.comment.join(" ")))
        .collect();
    println!("\n{} of {} doc comments have {FEW_WORDS} words or fewer", short.len(), items.len());
    assert!(short.len() < MAX_SHORT, "{}", short.join("\n"));
}

#[test]
fn the_readme_shows_the_program_that_runs_outside_of_the_workspace() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let program = std::fs::read_to_string(root.join("tests/outside/src/bin/local.rs")).unwrap();
    assert!(program.lines().count() <= 40, "{} lines", program.lines().count());
    assert!(readme.contains(&program), "README's program is not tests/outside/src/bin/local.rs");
}

/// The titles of a page's recipes. Code, whose hidden lines look alike, is passed over.
fn headings(page: &str) -> Vec<&str> {
    let mut in_code = false;
    let is_heading = |line: &&str| {
        in_code ^= line.starts_with("```");
        !in_code && line.starts_with("# ")
    };
    page.lines().filter(is_heading).map(|line| &line[2..]).collect()
}

#[test]
fn the_table_of_the_cookbook_links_to_every_recipe_in_its_order() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/COOKBOOK.md")).unwrap();
    let anchor = |heading: &str| {
        let kept = heading.chars().filter(|char| char.is_alphanumeric() || " -".contains(*char));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    let wanted: Vec<String> =
        headings(&page).iter().map(|heading| format!("| [{heading}](#{}) |", anchor(heading))).collect();
    let row = |line: &str| Some(format!("{}) |", line.strip_prefix("| [").and(line.split_once(") |"))?.0));
    let rows: Vec<String> = page.lines().filter_map(row).collect();
    assert!(wanted.len() > 15, "only {} recipes were found", wanted.len());
    assert_eq!(rows, wanted);
}
