(* Sums over the keys of a row, where keys are a list of anything and weights, scores and errors are functions of them. *)

Require Export Reals Lra List.
Export ListNotations.
Open Scope R_scope.

Lemma abs_bounds x b : Rabs x <= b -> - b <= x <= b.
Proof. pose proof (Rle_abs x). pose proof (Rle_abs (- x)). rewrite Rabs_Ropp in *. lra. Qed.

Lemma square_nonneg x : 0 <= x * x.
Proof. exact (Rle_0_sqr x). Qed.

Section Sums.
Context {key : Type}.

(* The sum of f over keys. *)
Fixpoint total (keys : list key) (f : key -> R) : R :=
  match keys with [] => 0 | k :: rest => f k + total rest f end.

(* f on a set of keys and 0 elsewhere; keys outside a set are `out`. *)
Definition part (S : key -> bool) (f : key -> R) (k : key) : R := if S k then f k else 0.
Definition out (S : key -> bool) (k : key) : bool := negb (S k).

Lemma total_ext keys f g : (forall k, In k keys -> f k = g k) -> total keys f = total keys g.
Proof.
  induction keys as [|k rest IH]; simpl; intros E; [easy|].
  rewrite (E k), IH; auto.
Qed.

Lemma total_le keys f g : (forall k, In k keys -> f k <= g k) -> total keys f <= total keys g.
Proof.
  induction keys as [|k rest IH]; simpl; intros E; [lra|].
  apply Rplus_le_compat; auto.
Qed.

Lemma total_plus keys f g : total keys (fun k => f k + g k) = total keys f + total keys g.
Proof. induction keys as [|k rest IH]; simpl; [ring | rewrite IH; ring]. Qed.

Lemma total_minus keys f g : total keys (fun k => f k - g k) = total keys f - total keys g.
Proof. induction keys as [|k rest IH]; simpl; [ring | rewrite IH; ring]. Qed.

Lemma total_times keys c f : total keys (fun k => c * f k) = c * total keys f.
Proof. induction keys as [|k rest IH]; simpl; [ring | rewrite IH; ring]. Qed.

Lemma total_zero keys : total keys (fun _ => 0) = 0.
Proof. induction keys as [|k rest IH]; simpl; [ring | rewrite IH; ring]. Qed.

Lemma total_nonneg keys f : (forall k, In k keys -> 0 <= f k) -> 0 <= total keys f.
Proof. intros E. rewrite <- (total_zero keys). now apply total_le. Qed.

Lemma total_app keys more f : total (keys ++ more) f = total keys f + total more f.
Proof. induction keys as [|k rest IH]; simpl; [ring | rewrite IH; ring]. Qed.

Lemma total_abs keys f : Rabs (total keys f) <= total keys (fun k => Rabs (f k)).
Proof.
  induction keys as [|k rest IH]; simpl; [rewrite Rabs_R0; lra|].
  pose proof (Rabs_triang (f k) (total rest f)). lra.
Qed.

Lemma total_part S keys f : total keys f = total keys (part S f) + total keys (part (out S) f).
Proof.
  rewrite <- total_plus. apply total_ext. intros k _.
  unfold part, out. destruct (S k); simpl; ring.
Qed.

Lemma part_nonneg S keys f : (forall k, In k keys -> 0 <= f k) -> 0 <= total keys (part S f).
Proof. intros E. apply total_nonneg. intros k I. unfold part. destruct (S k); [auto | lra]. Qed.

Lemma part_le S keys f :
  (forall k, In k keys -> 0 <= f k) -> total keys (part S f) <= total keys f.
Proof.
  intros E. rewrite (total_part S keys f).
  pose proof (part_nonneg (out S) keys f E). lra.
Qed.

Lemma member_le keys f k :
  (forall k, In k keys -> 0 <= f k) -> In k keys -> f k <= total keys f.
Proof.
  induction keys as [|j rest IH]; simpl; intros E I; [easy|].
  pose proof (E j (or_introl eq_refl)).
  assert (0 <= total rest f) by (apply total_nonneg; auto).
  destruct I as [->|I]; [lra|].
  assert (f k <= total rest f) by (apply IH; auto). lra.
Qed.
End Sums.

(* Sums may be exchanged. *)
Lemma total_swap {key row : Type} (keys : list key) (rows : list row) f :
  total keys (fun k => total rows (fun r => f k r)) = total rows (fun r => total keys (fun k => f k r)).
Proof.
  induction keys as [|k rest IH]; simpl; [now rewrite total_zero|].
  rewrite IH, total_plus. reflexivity.
Qed.

(* The inequality of Cauchy and Schwarz. *)
Section Squares.
Context {key : Type}.
Variable keys : list key.

Lemma squares_nonneg f : 0 <= total keys (fun k => f k * f k).
Proof. apply total_nonneg. intros. nra. Qed.

Lemma cauchy_schwarz_squared f g :
  total keys (fun k => f k * g k) * total keys (fun k => f k * g k)
  <= total keys (fun k => f k * f k) * total keys (fun k => g k * g k).
Proof.
  induction keys as [|k rest IH]; simpl; [lra|].
  set (fg := total rest (fun k => f k * g k)) in *.
  set (ff := total rest (fun k => f k * f k)) in *.
  set (gg := total rest (fun k => g k * g k)) in *.
  assert (Hf : 0 <= ff) by (apply total_nonneg; intros; nra).
  assert (Hg : 0 <= gg) by (apply total_nonneg; intros; nra).
  (* 2 f g fg <= f^2 gg + g^2 ff, as (f g fg)^2 <= (f^2 gg) (g^2 ff). *)
  assert (M : 2 * (f k * g k) * fg <= f k * f k * gg + g k * g k * ff).
  { apply Rle_trans with (Rabs (2 * (f k * g k) * fg)); [apply Rle_abs|].
    rewrite <- (Rabs_pos_eq (f k * f k * gg + g k * g k * ff)) by nra.
    apply Rsqr_le_abs_0. unfold Rsqr.
    assert (0 <= (f k * g k) * (f k * g k) * (ff * gg - fg * fg)) by
      (apply Rmult_le_pos; [nra | lra]).
    pose proof (Rle_0_sqr (f k * f k * gg - g k * g k * ff)). unfold Rsqr in *. nra. }
  nra.
Qed.

Lemma cauchy_schwarz f g :
  Rabs (total keys (fun k => f k * g k))
  <= sqrt (total keys (fun k => f k * f k)) * sqrt (total keys (fun k => g k * g k)).
Proof.
  rewrite <- sqrt_mult by apply squares_nonneg.
  rewrite <- sqrt_Rsqr_abs. apply sqrt_le_1_alt. apply cauchy_schwarz_squared.
Qed.

(* The length of a family, and the inequality of Minkowski. *)
Definition norm f := sqrt (total keys (fun k => f k * f k)).

Lemma norm_nonneg f : 0 <= norm f.
Proof. apply sqrt_pos. Qed.

Lemma norm_squared f : norm f * norm f = total keys (fun k => f k * f k).
Proof. apply sqrt_sqrt, squares_nonneg. Qed.

Lemma norm_le_of_squares f b : 0 <= b -> total keys (fun k => f k * f k) <= b * b -> norm f <= b.
Proof.
  intros B H. unfold norm. rewrite <- (sqrt_square b) by easy. now apply sqrt_le_1_alt.
Qed.

Lemma norm_plus f g : norm (fun k => f k + g k) <= norm f + norm g.
Proof.
  pose proof (norm_nonneg f). pose proof (norm_nonneg g).
  apply norm_le_of_squares; [lra|].
  rewrite (total_ext _ _ (fun k => (f k * f k + g k * g k) + 2 * (f k * g k))) by (intros; ring).
  rewrite !total_plus, total_times, <- !norm_squared.
  pose proof (cauchy_schwarz f g). fold (norm f) (norm g) in *.
  pose proof (Rle_abs (total keys (fun k => f k * g k))). lra.
Qed.

Lemma norm_times c f : 0 <= c -> norm (fun k => c * f k) = c * norm f.
Proof.
  intros C. unfold norm.
  rewrite (total_ext _ _ (fun k => (c * c) * (f k * f k))) by (intros; ring).
  rewrite total_times, sqrt_mult; [|nra | apply squares_nonneg].
  now rewrite sqrt_square.
Qed.

Lemma norm_le f g : (forall k, In k keys -> Rabs (f k) <= g k) -> norm f <= norm g.
Proof.
  intros E. apply sqrt_le_1_alt, total_le. intros k I.
  specialize (E k I). rewrite <- (Rabs_pos_eq (f k * f k)) by nra. rewrite Rabs_mult.
  pose proof (Rabs_pos (f k)). nra.
Qed.

Lemma norm_le_total f : (forall k, In k keys -> 0 <= f k) -> norm f <= total keys f.
Proof.
  intros E. apply norm_le_of_squares; [now apply total_nonneg|].
  rewrite <- total_times. apply total_le. intros k I.
  apply Rmult_le_compat_r; [auto | now apply member_le].
Qed.
End Squares.
